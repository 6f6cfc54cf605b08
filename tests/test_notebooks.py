"""What every committed notebook keeps to. nbmake runs them; see the Makefile.

A user's own copy, which JupyterLab saves with outputs, is not judged.
"""

import ast
import re
import subprocess
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.reads(committed(request.param), as_version=4)


def committed(path):
    """A file's text in the last commit."""
    command = ["git", "-C", path.parent, "show", f"HEAD:./{path.name}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no commit of git has {path.name}")


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def names(source, context):
    return {
        n.id
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Name) and isinstance(n.ctx, context)
    }


def test_stripped(notebook):
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    for cell in code(notebook):
        assert not cell.outputs and cell.execution_count is None, (
            "clear it: jupyter nbconvert --clear-output --inplace notebooks/*.ipynb"
        )


def test_parameters_are_read(notebook):
    (parameters,) = [c for c in code(notebook) if "parameters" in c.metadata.get("tags", [])]
    others = "\n".join(c.source for c in code(notebook) if c is not parameters)
    unread = (
        names(parameters.source, ast.Store)
        - names(others, ast.Load)
        - names(parameters.source, ast.Load)
    )
    assert not unread, f"parameters that no cell reads: {sorted(unread)}"


def test_every_preset_value_is_read(notebook):
    (parameters,) = [c for c in code(notebook) if "parameters" in c.metadata.get("tags", [])]
    source = "\n".join(c.source for c in code(notebook))
    for call in ast.walk(ast.parse(parameters.source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("preset"):
            for keyword in call.keywords:
                assert re.search(rf"\bP\.{keyword.arg}\b", source), f"P.{keyword.arg} is never read"


def test_small_and_free_of_this_machine():
    for path in NOTEBOOKS:
        text = committed(path)
        assert len(text) < 200_000, path.name
        assert not re.search(r'["\'\s](/home/|/Users/|/root/|/tmp/|/work/|[A-Z]:\\\\)', text), (
            path.name
        )

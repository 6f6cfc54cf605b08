"""Documents and the files for pip and conda: links, numbers and requirements are right."""

import json
import re
import tomllib

import nbformat
import pytest
import yaml
from committed import NOTEBOOKS, ROOT

from moelab.lab import cite

CITING = (ROOT / "README.md", *NOTEBOOKS)
DOCUMENTS = (*CITING, ROOT / "docs/guide.md", ROOT / "data/results/README.md")


def markdown(path):
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`]*`", "", markdown(path))
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    local = [link.partition("#")[0] for link in links if not re.match(r"\w+:|#", link)]
    assert not [link for link in local if not (path.parent / link).exists()]


@pytest.mark.parametrize("path", CITING, ids=lambda path: path.stem)
def test_cited_numbers_are_those_of_the_records(path):
    assert cite.fill_file(path) == path.read_text(), f"python -m moelab.lab cite {path}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_and_free_of_this_machine(path):
    text = path.read_text()
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert not re.search(r'["\'\s](/home/|/Users/|/root/|/tmp/|/work/|[A-Z]:\\\\)', text)


def test_conda_and_pip_ask_for_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["lab"], *extras["test"], "-e ."} - {"moelab[lab]"}
    wanted.add("python" + project["requires-python"])
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    assert {*pip, *(r for r in listed if isinstance(r, str) and r != "pip")} == wanted

"""Which room may import which.

The way down is lab, then commands, then replay, speculation and streaming, then experts, then
checkpoint. In the lab it is experiments, then charts, then plots and the instruments. The rules are
read from the source, imports inside functions included. No module is run.
"""

import ast
import json
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAMS = ("moelab.commands", "moelab.lab")  # what runs the engine
# What the modules of a room must not import. A module belongs to the room with the longest prefix.
MUST_NOT_IMPORT = {
    "moelab.checkpoint": ("moelab.experts", "moelab.streaming", "moelab.speculation", *PROGRAMS),
    "moelab.experts": ("moelab.streaming", "moelab.speculation", *PROGRAMS),
    "moelab.kernels": ("moelab.checkpoint", "moelab.experts", "moelab.streaming", *PROGRAMS),
    "moelab.streaming": ("moelab.speculation", "moelab.replay", *PROGRAMS),
    "moelab.speculation": ("moelab.streaming", "moelab.replay", *PROGRAMS),
    "moelab.replay": ("moelab.speculation", *PROGRAMS),
    "moelab.commands": ("moelab.lab",),
    "moelab.lab": ("moelab.lab.experiments", "moelab.lab.plots", "plotly"),
    "moelab.lab.charts": ("moelab.lab.experiments",),
    "moelab.lab.claims": ("moelab.lab.experiments",),
    "moelab.lab.plots": ("moelab.lab.experiments",),
    "moelab.lab.experiments": ("moelab.lab.plots", "plotly"),
    "moelab.__main__": ("moelab.lab.plots",),
    "moelab.synthesize": PROGRAMS,
    "moelab": ("moelab.replay", *PROGRAMS),
}


def within(module, room):
    return module == room or module.startswith(room + ".")


def room_of(module):
    if module == "moelab.lab":  # its ``advise`` imports the experiment when it is called
        return "moelab.lab.experiments"
    return max((room for room in MUST_NOT_IMPORT if within(module, room)), key=len)


def module_name(path):
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, source, modules):
    """``(line, imported module)`` of every import; ``modules`` tells modules from names in one."""
    inside = path.parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else ()
            base = ".".join([*base, *([node.module] if node.module else [])])
            for name in node.names:
                inner = f"{base}.{name.name}"
                yield node.lineno, inner if inner in modules else base
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, node.args[0].value


def circle(graph):
    """One circle of ``{module: {imported module: line}}`` as a list of modules, or None."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        found = next(filter(None, map(visit, graph.get(module, ()))), None)
        path.pop()
        done.add(module)
        return found

    return next(filter(None, map(visit, graph)), None)


def broken_rules(sources, recipes=()):
    """What breaks a rule, as ``file:line: why``.

    Args:
        sources (dict): The package's source texts by path, such as ``Path("moelab/hooks.py")``.
        recipes (tuple): Names of the scripts beside the package, which no module of it may import.
    """
    names = {path: module_name(path) for path in sources}
    graph, broken = {}, []
    for path, source in sources.items():
        module = names[path]
        forbidden = (*MUST_NOT_IMPORT[room_of(module)], *recipes)
        for line, imported in imports(path, source, set(names.values())):
            broken += [
                f"{path}:{line}: {module} must not import {imported} (nothing of {room})"
                for room in forbidden
                if within(imported, room) and room_of(module) != room
            ]
            if imported in names.values():
                graph.setdefault(module, {}).setdefault(imported, line)
    if found := circle(graph):
        files = {module: path for path, module in names.items()}
        steps = [f"{files[a]}:{graph[a][b]} imports {b}" for a, b in pairwise(found)]
        broken.append("a circle: " + ", ".join(steps))
    return broken


def private_names(path, source):
    """Where a source names ``_session``, the private attribute that ties a model to its files."""
    return [
        f"{path}:{node.lineno}: names ._session; use moelab.streaming.session.session_of(model)"
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr == "_session")
        or (isinstance(node, ast.Constant) and node.value == "_session")
    ]


@pytest.fixture(scope="module")
def sources():
    return {
        path.relative_to(ROOT): path.read_text() for path in sorted(ROOT.glob("moelab/**/*.py"))
    }


def recipes():
    return tuple(sorted(path.stem for path in ROOT.glob("data/recipes/*.py")))


def test_imports_go_down(sources):
    broken = broken_rules(sources, recipes())
    assert not broken, "\n" + "\n".join(broken)


def test_no_test_imports_another(sources):
    tests = sorted(ROOT.glob("tests/**/test_*.py"))
    stems = {path.stem for path in tests}
    broken = [
        f"{path.relative_to(ROOT)}:{line}: imports {imported}"
        for path in tests
        for line, imported in imports(path.relative_to(ROOT), path.read_text(), set())
        if imported.rpartition(".")[2] in stems
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_the_session_is_private():
    found = []
    outside = set(ROOT.glob("moelab/**/*.py")) - set(ROOT.glob("moelab/streaming/*.py"))
    outside |= {*ROOT.glob("data/recipes/*.py"), *ROOT.glob("tests/**/*.py")} - {Path(__file__)}
    for path in sorted(outside):
        found += private_names(path.relative_to(ROOT), path.read_text())
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                found += private_names(path.relative_to(ROOT), "".join(cell["source"]))
    assert not found, "\n" + "\n".join(found)


# One line added to one file, and what is then said of which line.
ADDED = [
    ("moelab/checkpoint/files.py", "from ..experts import GATE_UP", "nothing of moelab.experts"),
    ("moelab/checkpoint/files.py", "from ..streaming import layers", "nothing of moelab.streaming"),
    ("moelab/experts.py", "import moelab.speculation.policy", "nothing of moelab.speculation"),
    ("moelab/streaming/layers.py", "from ..speculation import policy", "moelab.speculation"),
    (
        "moelab/streaming/layers.py",
        "def f():\n    from ..lab import decode",
        "nothing of moelab.lab",
    ),
    ("moelab/streaming/layers.py", "from .. import lab", "nothing of moelab.lab"),
    ("moelab/streaming/layers.py", "from moelab.replay.costs import x", "nothing of moelab.replay"),
    ("moelab/streaming/layers.py", "from .. import load", "a circle"),
    ("moelab/streaming/layers.py", "def f():\n    from . import model", "a circle"),
    ("moelab/streaming/layers.py", "from ..commands import drafting", "nothing of moelab.commands"),
    ("moelab/speculation/policy.py", "from ..streaming.layers import S", "moelab.streaming"),
    ("moelab/speculation/policy.py", "from ..commands import chat", "nothing of moelab.commands"),
    ("moelab/replay/costs.py", "from ..lab import machine", "nothing of moelab.lab"),
    ("moelab/replay/costs.py", "from ..commands import chat", "nothing of moelab.commands"),
    ("moelab/commands/chat.py", "from ..lab import decode", "nothing of moelab.lab"),
    ("moelab/lab/decode.py", "from .experiments import bench", "moelab.lab.experiments"),
    ("moelab/lab/plots/style.py", "from ..experiments.bench import x", "moelab.lab.experiments"),
    ("moelab/lab/experiments/bench.py", "from ..plots import style", "moelab.lab.plots"),
    ("moelab/lab/experiments/bench.py", "import plotly.express as px", "nothing of plotly"),
    ("moelab/__init__.py", "from .lab import decode", "nothing of moelab.lab"),
    ("moelab/prompt.py", "from .commands import chat", "nothing of moelab.commands"),
    ("moelab/lab/experiments/bench.py", "import corpus", "nothing of corpus"),
    ("moelab/lab/decode.py", "import importlib\nimportlib.import_module('corpus')", "of corpus"),
]
HOUSE = {
    "moelab/__init__.py": "from .streaming.model import load",
    "moelab/__main__.py": "from .lab.experiments import bench",
    "moelab/prompt.py": "from .checkpoint import describe",
    "moelab/commands/__init__.py": "",
    "moelab/commands/chat.py": "from ..streaming.model import load\nfrom ..prompt import render",
    "moelab/checkpoint/__init__.py": "from .files import read_json",
    "moelab/checkpoint/files.py": "import json",
    "moelab/experts.py": "from .checkpoint import Checkpoint",
    "moelab/streaming/__init__.py": "",
    "moelab/streaming/layers.py": "from ..experts import GATE_UP",
    "moelab/streaming/reading/reader.py": "",
    "moelab/streaming/model.py": "from . import layers",
    "moelab/speculation/__init__.py": "",
    "moelab/speculation/policy.py": "",
    "moelab/replay/costs.py": "from ..streaming.model import load",
    "moelab/lab/__init__.py": "",
    "moelab/lab/machine.py": "from .. import DATA",
    "moelab/lab/decode.py": "from .machine import card",
    "moelab/lab/plots/style.py": "from ..machine import card",
    "moelab/lab/experiments/__init__.py": "",
    "moelab/lab/experiments/bench.py": "from ...replay import costs\nfrom .. import decode",
}


@pytest.mark.parametrize("file, line, said", ADDED)
def test_one_more_import_is_found(file, line, said):
    house = {Path(path): source for path, source in HOUSE.items()}
    assert broken_rules(house, ("corpus",)) == []
    house[Path(file)] += f"\n{line}"
    broken = broken_rules(house, ("corpus",))
    at = f"{file}:{len(house[Path(file)].splitlines())}"
    assert [text for text in broken if said in text and at in text], broken


def test_a_private_name_is_found():
    assert private_names("a.py", "x = model\ny = x._session.table") and private_names(
        "a.py", "getattr(model, '_session')"
    )
    assert not private_names("a.py", "session = session_of(model)")

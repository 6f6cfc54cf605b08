"""No room of the package imports one above it, and no import goes round in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# From the top. "" is moelab's own modules, which every room may import.
ROOMS = "__main__|lab|commands||replay|streaming speculation|experts|checkpoint kernels"
FLOORS = {room: i for i, floor in enumerate(ROOMS.split("|")) for room in floor.split(" ")}


def room_of(module):
    name = module.removeprefix("moelab").removeprefix(".")
    return max((r for r in FLOORS if f"{name}.".startswith(f"{r}.") or not r), key=len)


def imports(path, module, modules):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            inside = [] if node.level == 0 else path.relative_to(ROOT).parts[: -node.level]
            base = ".".join([*inside, *filter(None, [node.module])])
            names = {f"{base}.{name.name}" for name in node.names}
            yield from (n if n in modules else base for n in names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_imports_go_down():
    paths = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in ROOT.glob("moelab/**/*.py")
        if ".ipynb_checkpoints" not in p.parts  # which JupyterLab makes
    }
    graph = {m: {i for i in imports(p, m, paths) if i in paths} - {m} for m, p in paths.items()}
    TopologicalSorter(graph).prepare()  # or it names the circle
    for module, found in graph.items():
        for room in {room_of(imported) for imported in found} - {room_of(module), ""}:
            assert FLOORS[room] > FLOORS[room_of(module)], f"{module} imports {room}"

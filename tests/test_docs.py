"""Links and numbers of the documents, requirements of pip and conda, and imports are right.

No measured number is typed into prose: the number would not follow its record. ``MEASURED`` says
what counts as a measured number, ``NO_PROSE`` where numbers may stand. A setting with a unit is
written as code: `100 MB/s`.
"""

import ast
import pydoc
import re
import shutil
import subprocess
import tomllib
from graphlib import TopologicalSorter

import mlx.core as mx
import nbformat
import pytest
import readme
import scorecard
import yaml
from committed import HERE, NOTEBOOKS, ROOT

import moelab
import notebooks
from moelab import shipped

README, GUIDE = ROOT / "README.md", ROOT / "docs/guide.md"
DROPPED = ROOT / "docs/did_not_work.md"  # has numbers of removed code, with their sources
SCORECARD = ROOT / "docs/scorecard.md"
DOCUMENTS = (README, GUIDE, DROPPED, SCORECARD, *NOTEBOOKS)
BLOCK = r"<!-- numbers: .*?<!-- end -->"  # of the README, which `make numbers` writes

# Numbers may stand in code, a notebook's time, settings of its sliders, names and versions.
NO_PROSE = (
    r"```.*?```|^    [^\n]*|`[^`]*`|\*\*(?:Takes|Try)\*\*[^\n]*(?:\n[^\n]+)*"
    r"|[A-Za-z]\w*-\d+\.\d+|\b(?:Python|glibc|version|temperature|probability) [\d.]+|95% interval"
)
MEASURED = (
    r"\b\d+\.\d+"
    r"|\b[\d,]+ ?(?:%|percent\b|(?:tok|tokens|[kMG]B)(?:/s\b| (?:a|per) second\b)|[mµun]s\b)"
    r"|\b[\d,]+ ?(?:times (?:as|the|faster|slower|more|less)\b|[x\u00d7] ?(?:as|faster|slower)\b)"
)


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


def typed(text):
    """The hidden marks of a text, and its measured numbers with the words around them."""
    text = re.sub(rf"{BLOCK}|{NO_PROSE}", "name", text, flags=re.S | re.M)
    return re.findall(rf"<!--.{{,30}}|.{{,30}}(?:{MEASURED}).{{,15}}", text)


def test_numbers_of_the_readme_and_the_scorecard_are_those_of_the_records(monkeypatch):
    monkeypatch.setattr(shipped, "DATA", ROOT / "data")
    assert scorecard.page() == SCORECARD.read_text(), "make numbers"
    if mx.default_device() == mx.gpu:  # a GPU's slots lend no memory to a prompt
        pytest.skip("the README's plans are made on a CPU")
    assert readme.filled(README.read_text()) == README.read_text(), "make numbers"


@pytest.mark.parametrize("path", [README, GUIDE, *NOTEBOOKS], ids=lambda path: path.stem)
def test_no_measured_number_is_typed(path):
    found = typed(markdown(path))
    assert not found, "a cell prints it from its table; a name or setting may join NO_PROSE"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_pictures_and_nothing_of_this_machine(path):
    text = path.read_text()
    assert not notebooks.MACHINE.search(text)
    made = nbformat.reads(text, as_version=4)
    assert "widgets" not in made.metadata, "widget state: make notebooks"
    for cell in (cell for cell in made.cells if cell.cell_type == "code"):
        assert not cell.execution_count and "execution" not in cell.metadata
        assert all(output.output_type != "error" for output in cell.outputs)
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        assert kinds <= {"image/png", "text/html", "text/markdown", "text/plain"}
        if re.search(r"(?<![\w.])(show|explore)\(", cell.source):
            assert "image/png" in kinds, f"no picture, make notebooks: {cell.source[:60]}"
        folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        assert folded is (len(cell.source.splitlines()) > 25), "JupyterLab folds what is long"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("path", [README, GUIDE], ids=lambda path: path.stem)
def test_commands_of_the_set_up(path):
    """Both documents name the systems that pip and MLX need. Each target that they name exists.

    No command has a comment: zsh, a Mac's shell, gives a comment's words to the command.
    """
    text = path.read_text()
    for asked in ("Python 3.11 or newer", "glibc 2.35", "macOS 14 or newer on Apple silicon"):
        assert asked in text
    named = set(re.findall(r"(?:`|^ {4})make (?:\w+=\S+ )*([\w-]+)", text, re.M))
    assert "test" in named
    done = subprocess.run(["make", "-n", *named], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    begins = r"(?:\w+=\S* )*(?:python3?|pip|make|curl|echo|mlx\.launch|codex|claude) "
    assert not re.findall(rf"^ {{4}}{begins}.* # .*", text, re.M)


def test_public_names_are_found_and_the_guides_code_runs(monkeypatch, tmp_path, capsys):
    assert {*moelab.__all__} <= {*dir(moelab)}
    for name in moelab.__all__:
        assert "attrgetter" not in pydoc.render_doc(getattr(moelab, name))
    (tmp_path / "data").symlink_to(moelab.DATA)
    monkeypatch.chdir(tmp_path)
    section = GUIDE.read_text().partition("## In your own code\n")[2].partition("\nIn a shell:")[0]
    exec("\n".join(re.findall(r"^    (.*)", section, re.M)), {})
    assert len(re.findall(r"\d+ of \d+ drafts accepted", capsys.readouterr().out)) == 2


def test_conda_and_pip_ask_for_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["lab"], *extras["serve"], *extras["vlm"]}
    wanted |= {*extras["schema"], *extras["test"], "-e ."}
    wanted = wanted - {"moelab[lab,schema,serve,vlm]"} | {"python" + project["requires-python"]}
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    assert {*pip, *(r for r in listed if isinstance(r, str) and r != "pip")} == wanted


def test_a_first_failure_hides_no_other():
    """The workflow tests each system and runs each command, whatever failed before."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert {"ubuntu-24.04-arm", "macos-15"} < {*jobs["test"]["strategy"]["matrix"]["os"]}
    assert not any(job.get("strategy", {"fail-fast": False})["fail-fast"] for job in jobs.values())
    for job in jobs.values():
        tests = [s for s in job["steps"] if re.search("pytest|make [a-z]", s.get("run", ""))]
        assert all(step["if"] == "${{ !cancelled() }}" for step in tests[1:])
        assert all(step["run"].count("pytest") < 2 for step in tests)


# From the top: a room (folder) imports rooms below it. The room "" is moelab/ without its folders.
ROOMS = "__main__|lab|commands||replay|streaming speculation|experts|checkpoint kernels"
FLOORS = {room: i for i, floor in enumerate(ROOMS.split("|")) for room in floor.split(" ")}


def room_of(module):
    name = module.removeprefix("moelab").removeprefix(".")
    return max((r for r in FLOORS if f"{name}.".startswith(f"{r}.") or not r), key=len)


def imports(path, modules):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            inside = [] if node.level == 0 else path.relative_to(HERE).parts[: -node.level]
            base = ".".join([*inside, *filter(None, [node.module])])
            names = {f"{base}.{name.name}" for name in node.names}
            yield from (n if n in modules else base for n in names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_imports_go_down():
    paths = {
        ".".join(p.relative_to(HERE).with_suffix("").parts).removesuffix(".__init__"): p
        for p in HERE.glob("moelab/**/*.py")
        if ".ipynb_checkpoints" not in p.parts  # which JupyterLab makes
    }
    graph = {m: {i for i in imports(p, paths) if i in paths} - {m} for m, p in paths.items()}
    TopologicalSorter(graph).prepare()  # raises an error that names a cycle
    for module, found in graph.items():
        for room in {room_of(imported) for imported in found} - {room_of(module), ""}:
            assert FLOORS[room] > FLOORS[room_of(module)], f"{module} imports {room}"

"""The documents: what they link is there, and what they list is complete."""

import re
from pathlib import Path

import nbformat
import pytest

from moelab.lab import cite
from moelab.lab.plots.pages import summary

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROSE = ("README.md", "docs/guide.md", "data/results/README.md")
DOCUMENTS = [*(ROOT / path for path in PROSE), *NOTEBOOKS]
LINES = 90  # of the README, at most


def markdown(path):
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`]*`", "", markdown(path))
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    local = [link.partition("#")[0] for link in links if not re.match(r"\w+:|#", link)]
    missing = [link for link in local if not (path.parent / link).exists()]
    assert not missing, f"{path.relative_to(ROOT)} links {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_picture_has_words(path):
    assert "![](" not in markdown(path), "a picture needs alternative text"


def test_the_readme_is_short_and_lists_every_notebook():
    text = cite.shown((ROOT / "README.md").read_text())
    assert len(text.splitlines()) < LINES
    for path in NOTEBOOKS:
        question = summary(nbformat.read(path, as_version=4)).title.partition(" · ")[2]
        assert f"| [{path.stem}](notebooks/{path.name}) | {question} |" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_links_its_pictures(path):
    """A reader on GitHub, who sees no output, finds the figures from the notebook's top."""
    gallery = ROOT / "docs" / "figures" / f"{path.stem}.md"
    if not gallery.exists():
        pytest.skip("`make figures` has not drawn this notebook")
    first = nbformat.read(path, as_version=4).cells[0].source
    assert f"](../docs/figures/{gallery.name})" in first
    for picture in re.findall(r"\]\(([^)]+\.png)\)", gallery.read_text()):
        assert (gallery.parent / picture).stat().st_size < 150_000, f"{picture} is large"

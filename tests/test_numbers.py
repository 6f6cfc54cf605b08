"""Numbers in prose follow from records: each carries its expression, and a fresh fill agrees."""

import re
from pathlib import Path

import nbformat
import pytest

from moelab import DATA
from moelab.lab import cite
from moelab.lab.plots.pages import summary

ROOT = DATA.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.:/-])-?\d+(?:[.,]\d+)*(?!\w)")  # not in a name: H200, 35B, top-6
HELD = (  # parts of documents: no number in them is without an expression
    ("README.md", "## Which one should I use?", "Numbers are medians"),
    ("README.md", "## What was measured where", "## Licence"),
)
DOCUMENTS = ["README.md", *NOTEBOOKS]
# A link, another document's number, a setting of the environment, or code, which has names.
NO_NUMBER = (
    r"`[^`]*`|\[\d\d\]\([^)]*\)|\]\([^)]*\)|"
    r"[Nn]otebook \d\d|(PR|issue|section) \d+|[A-Z]+(_[A-Z]+)+=\d"
)


def uncited(text):
    """Where a text has numbers without an expression."""
    text = re.sub(NO_NUMBER, "", " ".join(cite.uncited(text).split()))
    return [text[max(0, m.start() - 40) : m.end() + 20] for m in NUMBER.finditer(text)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: Path(path).name)
def test_cited_numbers_are_those_of_the_records(document):
    path = ROOT / document
    assert cite.fill_file(path) == path.read_text(), f"python -m moelab.lab cite {document}"


@pytest.mark.parametrize("document, begin, end", HELD)
def test_every_number_of_a_held_part_has_its_expression(document, begin, end):
    _, begun, text = (ROOT / document).read_text().partition(begin)
    text, ended, _ = text.partition(end) if end else (text, True, "")
    assert begun and ended, f"{document} has no {begin!r}, or no {end!r} after it"
    left = uncited(re.sub(r"^\d\. ", "", text, flags=re.M))
    assert not left, f"{document}: numbers without an expression: {left}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_number_of_an_opening_and_a_takeaway_has_its_expression(path):
    """But for how long the notebook runs."""
    notebook = nbformat.read(path, as_version=4)
    opening = re.sub(r"<!--:.*?-->", "", notebook.cells[0].source, flags=re.S).split("\n\n")[1:]
    opening = [p for p in opening if not re.search(r"\b(minutes?|seconds)\b", p)]
    left = uncited("\n\n".join([*opening, summary(notebook).answer]))
    assert not left, f"{path.stem}: numbers without an expression: {left}"


def test_numbers_are_found_in_a_text():
    text = "H200, v0.1, 35B, [02](a/02_x.ipynb) 1.5 `2` [3 - 4%] K=5, A_B=0, 3x, 13<!--given-->%, 7"
    assert len(uncited(text)) == 5 and "13" not in str(uncited(text))

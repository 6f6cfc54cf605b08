"""The pages and the index that `make run` writes."""

import base64
import json
import re
import shutil

import nbformat
import pytest
from committed import NOTEBOOKS

from moelab.lab.__main__ import main
from moelab.lab.plots import index, pages

FIGURE = """
import ipywidgets
from moelab.lab.plots import explore, show, slider, style

def draw(k=1):
    fig = style.figure("t", "x", "y").add_scatter(y=[k, 2])
    return style.describe(fig, alt=f"a line from {k}", finding=f"it rises to {k}")

show(draw())
explore(draw, k=slider("k", 2, 3, 2))
display(ipywidgets.IntSlider())
"""
DRAWING = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()


def notebook(*cells):
    made = nbformat.v4.new_notebook()
    new = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    made.cells = [new[kind](source) for kind, source in cells]
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of pages made of a small notebook whose last cell fails."""
    folder = tmp_path_factory.mktemp("pages")
    source = notebook(
        (
            "markdown",
            "# Why a < b?\n\n![boxes](attachment:drawing.svg)\n\nSee [01](01_next.ipynb).",
        ),
        ("code", FIGURE),
        ("markdown", "> **Takeaway.** By **1**,\n> always.\n\n**Limits.** None."),
        ("code", "1 / 0"),
    )
    source.cells[0].attachments = {"drawing.svg": {"image/svg+xml": DRAWING}}
    nbformat.write(source, folder / "00_first.ipynb")
    (folder / "01_next.ipynb").touch()
    before = (folder / "00_first.ipynb").read_bytes()
    assert pages.main(str(folder), str(folder / "build"), "00_first") == 1  # one notebook failed
    assert (folder / "00_first.ipynb").read_bytes() == before
    return folder / "build"


def test_a_page_needs_no_network(built):
    page = (built / "00_first.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]* (src|href)=.https?:", page)
    assert 'src="plotly.min.js"' in page and len(page) < 1_000_000
    assert "Plotly" in (built / "plotly.min.js").read_text()[:1000]


def test_a_page_shows_all_there_was(built):
    page = (built / "00_first.html").read_text()
    assert 'aria-label="a line from 1"' in page and "Plotly.react" in page
    assert 'aria-label="a line from 2"' in page and "it rises to 2" in page  # above the slider
    assert "ZeroDivisionError" in page and page.count("make lab</code>, notebook 00_first") == 2
    assert page.count("<b>t</b>") == 2 and "<summary>Code, 11 lines</summary>" in page
    assert "data:image/svg+xml;base64," in page and 'href="01_next.html"' in page
    assert 'name="viewport"' in page
    for link in ("index.html", "01_next.html"):
        assert page.count(f'<a href="{link}">') == 2 + (link == "01_next.html")


BARS = (
    "\r",
    " \n",
    "\r  0%|          | 0/3 [00:00<?, ?run/s]\r                      \r",
    "bench: 100%|██████| 3/3 [01:02<00:00,  2.1 s/run]\nload: 7file [00:01, 5.6file/s]\n",
)
WARNINGS = (
    "UserWarning: 3 of [4] layers | 75%\n",
    "  0%|          | 0/3 [00:00<?, ?run/s]out of memory\n",
    "[00:01:02] killed\n",
)


def test_a_page_keeps_warnings_and_drops_what_a_progress_bar_left():
    made = [nbformat.v4.new_output("stream", name="stderr", text=t) for t in (*BARS, *WARNINGS)]
    assert [o.text for o in made if not pages._is_progress(o)] == list(WARNINGS)


def test_the_index_says_question_and_answer_and_what_failed(built):
    text = (built / "index.html").read_text()
    assert '<a href="00_first.html">Why a &lt; b?</a>' in text and 'name="viewport"' in text
    assert "By <strong>1</strong>,\nalways." in text and "Limits" not in text
    assert index.FAILED in text and text.count("Run on ") == 1 and "github" not in text


def test_an_index_is_written_again_and_links_other_machines(built, tmp_path):
    """Of pages that were made elsewhere; what else a folder holds is not listed."""
    for folder, machine in ((tmp_path, "A & B"), (tmp_path / "macos-15", "M1")):
        folder.mkdir(exist_ok=True)
        shutil.copy(built / "00_first.html", folder)
        said = json.loads((built / "00_first.json").read_text())
        said |= {"machine": machine, "fast": False, "failed": False}
        (folder / "00_first.json").write_text(json.dumps(said))
    (tmp_path / "peers").mkdir()
    (tmp_path / "01_no_page.json").write_text("{}")
    assert main(["index", str(tmp_path), "someone/moelab"]) == 0
    here, there = ((tmp_path / part / "index.html").read_text() for part in ("", "macos-15"))
    assert 'href="macos-15/index.html">The same notebooks, run on M1<' in here
    assert 'href="../index.html">The same notebooks, run on A &amp; B<' in there
    assert "<p>Run on A &amp; B.</p>" in here and "<p>Run on M1.</p>" in there
    for text in (here, there):
        assert "https://github.com/someone/moelab" in text and index.FAILED not in text
        assert "peers" not in text and "01_no_page" not in text and index.SMALL not in text


def test_an_index_takes_no_html_of_titles_and_answers(built, tmp_path, capsys):
    said = json.loads((built / "00_first.json").read_text())
    text = "z <script>a</script> [b](javascript:c) **d**"
    name = '0"><script>'
    (tmp_path / f"{name}.html").touch()
    made = said | dict.fromkeys(("title", "answer", "machine"), text)
    (tmp_path / f"{name}.json").write_text(json.dumps(made))
    page = index.index(tmp_path)
    assert "<script" not in page and 'href="javascript' not in page
    assert "<strong>d</strong>" in page
    for wrong in ("[]", "{}", json.dumps(said | {"answer": 7})):
        (tmp_path / f"{name}.json").write_text(wrong)
        assert main(["index", str(tmp_path)]) == 1 and "expected" in capsys.readouterr().err


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_links_only_what_is_beside_it(path):
    cells = nbformat.read(path, as_version=4).cells
    sources = ("[a](../data/b.md)", *(c.source for c in cells if c.cell_type == "markdown"))
    text = "".join(pages.for_page(source) for source in sources)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    beside = {other.with_suffix(".html").name for other in NOTEBOOKS}
    assert all(link in beside or re.match("attachment:|https?:|#", link) for link in links)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_has_a_question_and_an_answer(path):
    said = pages.summary(nbformat.read(path, as_version=4))
    assert said.title.startswith(path.stem[:2]) and said.answer


def test_an_answer_may_be_what_a_cell_showed():
    made = notebook(("markdown", "# A question?"), ("code", "say(...)"))
    shown = {"text/markdown": "> **Takeaway.** By 1.5,\n> always."}
    made.cells[1].outputs = [nbformat.v4.new_output("display_data", shown)]
    assert pages.summary(made) == pages.Summary("A question?", "By 1.5,\n always.")


def test_no_answer_is_said():
    with pytest.raises(ValueError, match="needs a title"):
        pages.summary(notebook(("markdown", "# A question?")))

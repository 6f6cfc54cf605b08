"""The pages and the index that `make run` writes."""

import base64
import html
import json
import re
import shutil

import nbformat
import pytest
from committed import NOTEBOOKS

from moelab.lab.__main__ import main
from moelab.lab.plots import index, pages

FIGURE = """
from moelab.lab.plots import explore, show, slider, style

def draw(k=1):
    fig = style.figure("t", "x", "y").add_scatter(y=[k, 2])
    return style.describe(fig, alt=f"a line from {k}", finding=f"it rises to {k}")

show(draw())
explore(draw, k=slider("k", 2, 3, 2))
"""
DRAWING = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()
# What cells write to stderr, and how often it stands on the page: as code, and if it is shown.
STDERR = {
    "bench: 100%|██████| 3/3 [01:02<00:00,  2.1 s/run] load: 7file [00:01, 5.6file/s]": 1,
    "  0%|          | 0/3 [00:00<?, ?run/s]out of memory": 2,
    "UserWarning: 3 of [4] layers | 75%": 2,
    "[00:01:02] killed": 2,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of pages made of a small notebook whose last cell fails."""
    folder = tmp_path_factory.mktemp("pages")
    new, write = nbformat.v4, "import sys; print({!r}, file=sys.stderr)"
    title = "# Why a < b?\n\n![boxes](attachment:drawing.svg)\n\nSee [01](01_next.ipynb)."
    drawing = {"drawing.svg": {"image/svg+xml": DRAWING}}
    answer = "> **Takeaway.** By **1**,\n> <script>a</script> [b](javascript:c).\n\n**Limits.** No."
    cells = [new.new_markdown_cell(title, attachments=drawing), new.new_code_cell(FIGURE)]
    cells += [new.new_code_cell(write.format(text)) for text in STDERR]
    cells += [new.new_markdown_cell(answer), new.new_code_cell("1 / 0")]
    source = new.new_notebook(cells=cells)
    nbformat.write(source, folder / "00_first.ipynb")
    (folder / "01_next.ipynb").touch()
    before = (folder / "00_first.ipynb").read_bytes()
    assert pages.main(str(folder), str(folder / "build"), "00_first") == 1  # one notebook failed
    assert (folder / "00_first.ipynb").read_bytes() == before
    return folder / "build"


def test_a_page_and_the_index_show_all_there_was_and_need_no_network(built):
    page = (built / "00_first.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]* (src|href)=.https?:", page)
    assert 'src="plotly.min.js"' in page and len(page) < 1_000_000
    assert "Plotly" in (built / "plotly.min.js").read_text()[:1000]
    assert 'aria-label="a line from 1"' in page and "Plotly.react" in page
    assert 'aria-label="a line from 2"' in page and "it rises to 2" in page  # above the slider
    assert "ZeroDivisionError" in page and page.count("make lab</code>, notebook 00_first") == 1
    assert "data:image/svg+xml;base64," in page and "<summary>Code, 9 lines</summary>" in page
    for text, times in STDERR.items():  # a bar is dropped, a warning is not
        assert html.unescape(page).count(text) == times
    assert page.count('<a href="index.html">') == 2 and page.count('<a href="01_next.html">') == 3
    text = (built / "index.html").read_text()  # the question, the answer, and that a cell failed
    assert '<a href="00_first.html">Why a &lt; b?</a>' in text and index.FAILED in text
    assert "By <strong>1</strong>," in text and "Limits" not in text
    assert "<script" not in text and 'href="javascript' not in text


def test_an_index_is_written_again_and_links_other_machines(built, tmp_path, capsys):
    """Of pages that were made elsewhere; a damaged description is refused."""
    said = json.loads((built / "00_first.json").read_text()) | {"fast": False, "failed": False}
    for folder, machine in ((tmp_path, "A & B"), (tmp_path / "macos-15", "M1")):
        folder.mkdir(exist_ok=True)
        shutil.copy(built / "00_first.html", folder)
        (folder / "00_first.json").write_text(json.dumps(said | {"machine": machine}))
    assert main(["index", str(tmp_path), "someone/moelab"]) == 0
    here, there = ((tmp_path / part / "index.html").read_text() for part in ("", "macos-15"))
    assert 'href="macos-15/index.html">The same notebooks, run on M1<' in here
    assert 'href="../index.html">The same notebooks, run on A &amp; B<' in there
    for text in (here, there):
        assert "https://github.com/someone/moelab" in text and index.SMALL not in text
    (tmp_path / "00_first.json").write_text(json.dumps(said | {"answer": 7}))
    assert main(["index", str(tmp_path)]) == 1 and "expected" in capsys.readouterr().err


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_links_only_what_is_beside_it_and_has_question_and_answer(path):
    made = nbformat.read(path, as_version=4)
    sources = ("[a](../data/b.md)", *(c.source for c in made.cells if c.cell_type == "markdown"))
    text = "".join(pages.for_page(source) for source in sources)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    beside = {other.with_suffix(".html").name for other in NOTEBOOKS}
    assert all(link in beside or re.match("attachment:|https?:|#", link) for link in links)
    said = pages.summary(made)
    assert said["title"].startswith(path.stem[:2]) and said["answer"]

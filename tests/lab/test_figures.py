"""Figures: charts of a table, sliders without a browser, and the pages of ``make run``."""

import base64
import html
import json
import re
import shutil

import nbformat
import pytest
from committed import NOTEBOOKS

from moelab.lab import charts, records
from moelab.lab.__main__ import main
from moelab.lab.plots import choice, explore, pages, slider

CARD = {"cpu": "Z80", "gpu": "H9", "backend": "CUDA", "cores": 2, "memory_nbytes": 2**34}
CARD |= {"os": "Linux 6", "mlx": "1", "mlx-lm": "2", "moelab": "3", "date": "2026-01-01"}
WORDS = {"title": "t", "finding": "found"}


def samples(**header):
    """With 4 slots ``a`` takes 1 to 3 s, ``b`` twice as long; with 8 ``b`` takes 4 to 12 s."""
    rows = [
        {"variant": name, "round": i, "slots": n, "seconds": (i + 1.0) * times * n / 4}
        for name, times, slots in (("a", 1, (4,)), ("b", 2, (4, 8)))
        for n in slots
        for i in range(3)
    ]
    settings = {"model": "tiny", "cache_state": "warm"}
    return records.table({"machine": None, "settings": settings, "rows": rows} | header)


def test_the_alt_text_says_what_is_drawn():
    fig = charts.bars(samples(), "seconds * 1e3", axis="ms", **WORDS)
    assert fig.layout.meta["alt"] == "Bars of ms. a 2000, b 5000."
    assert list(fig.data[0].x) == [2000, 5000]
    fig = charts.bars(samples(), "seconds", "variant", "slots", axis="s", **WORDS)
    assert fig.layout.meta["alt"] == "Bars of s. 4: a 2.00, b 4.00. 8: b 8.00."
    axes, top = ("slots", "s"), {"top": 9.0}
    fig = charts.lines(samples(), "slots", "seconds", axes=axes, ceilings=top, **WORDS)
    assert fig.layout.meta["alt"] == "s over slots. a: 2 at 4. b: 4 at 4, 8 at 8. Line, top: 9."
    assert fig.layout.yaxis.range[1] > 9
    shares = {"half": "seconds / 2", "all": "seconds"}
    fig = charts.parts(samples(), shares, axis="s", **WORDS)
    assert "a: half 1, all 2; b: half 3, all 6" in fig.layout.meta["alt"]
    rows = [("CPU", "wait", 0.0, 1.0), ("SSD", "read", 0.2, 0.9), ("CPU", "compute", 1.0, 1.5)]
    spans = records.pandas().DataFrame(rows, columns=["lane", "what", "begin_s", "end_s"])
    fig = charts.timeline(spans, axis="ms", **WORDS)
    assert fig.layout.meta["alt"] == "Timeline, ms. wait 1e+03, read 700, compute 500."
    assert [list(bar.base) for bar in fig.data] == [[0], [200], [1000]]


def test_a_chart_says_which_machine_was_recorded():
    recorded = samples(record="cuda_x", machine=CARD)
    both = records.together({"here": samples(), "there": recorded})
    meta = charts.bars(both, "seconds", panel="source", axis="s", **WORDS).layout.meta
    assert "recorded 2026-01-01 by engine 1 of" in meta["note"] and "here: " in meta["note"]
    assert "tiny, page cache warm, n=3 to 6" in meta["note"]
    assert any("mlx 1, mlx-lm 2, moelab 3" in line for line in meta["machines"])
    assert "here" not in charts.bars(recorded, "seconds", axis="s", **WORDS).layout.meta["note"]
    joined = records.together({"x": recorded, "y": recorded.copy()})
    joined.attrs["headers"][1] = recorded.attrs | {"machine": CARD | {"gpu": "H7"}}
    twice = records.together({"here": samples(), "there": joined}, "where")
    note = charts.bars(twice, "seconds", axis="s", **WORDS).layout.meta["note"]
    assert ": H7, CUDA backend" in note
    spoilt = {"disturbed": True, "cores_of_others": 1.0}
    meta = charts.bars(samples(load=spoilt), "seconds", axis="s", **WORDS).layout.meta
    assert meta["note"].startswith("DISTURBED: others used 1.0 cores; tiny")
    recorded.attrs |= {"load": spoilt, "note": "an old engine"}
    note = charts.bars(recorded, "seconds", axis="s", **WORDS).layout.meta["note"]
    assert "an old engine; recorded" in note
    assert "DISTURBED" not in note
    counted = charts.bars(records.computed([{"variant": "a", "x": 1}]), "x", axis="x", **WORDS)
    assert not counted.layout.meta["machines"]  # computed rows come from no machine


def test_a_figure_is_as_high_as_its_bars_and_panels_need():
    def height(n):
        rows = [{"variant": str(v), "panel": p, "s": 1.0} for v in range(n) for p in "pq"]
        made = records.table({"settings": {}, "rows": rows})
        made = charts.bars(made, "s", panel="panel", axis="s", **WORDS).layout
        assert made.meta["narrow"]["height"] > made.height  # panels in a column
        return made.height

    assert height(9) - height(8) == height(3) - height(2) > 0


def line(*values, **words):
    made = records.computed({"variant": "a", "x": [0, 1], "y": values})
    return charts.lines(made, "x", "y", axes=("slots", "ms"), **WORDS | words)


def drawn(top_k=8, slots=16):
    if slots < top_k:
        raise ValueError(f"slots {slots} < top_k {top_k}")
    fig = line(top_k, slots, title=f"top-k {top_k}", finding=f"{top_k} of {slots}")
    return fig.update_yaxes(range=[0, slots])


def explorer(**given):
    slots = choice("slots", (4, 8, 16, 17, 32), 16)
    return explore(drawn, **given, top_k=slider("top-k", 1, 8, 8), slots=slots)


def test_axes_and_the_room_for_a_title_grow_and_never_shrink(capsys):
    made = explorer(extremes=[{"slots": 8}, {"top_k": 1}])
    for slots, top in ((8, 16), (17, 16), (32, 32), (16, 32)):
        made.controls["slots"].value = slots
        assert list(made.figure.layout.yaxis.range) == [0, top]
        assert json.loads(made._plot.figure)["layout"]["yaxis"]["range"] == [0, top]
    following = explorer(extremes=[{"slots": 8}], follow=True)
    following.controls["slots"].value = 8
    assert list(following.figure.layout.yaxis.range) == [0, 8]
    made._draw(line(1, 2, title="a longer title"))
    made.controls["top_k"].value = 2
    assert made._heading.value.count("a longer title") == 1  # the hidden title keeps its room


def test_an_error_is_shown_until_a_slider_redraws_the_figure(capsys):
    made = explorer()
    made.controls["slots"].value = 4
    assert "slots 4 &lt; top_k 8" in made._state.value and isinstance(made.error, ValueError)
    made.controls["top_k"].value = 4
    assert made.error is None and not made._state.value
    assert "a: 4 from 0 to 1." in made._plot.figure
    assert "4 of 4" in made._words.value and "<b>top-k 4</b>" in made._heading.value
    assert all(c.continuous_update for c in made.controls.values())  # the function is quick
    with pytest.raises(ValueError, match="slots 4 < top_k 8"):
        explorer(extremes=[{"slots": 4}])


def test_with_a_run_button_nothing_is_measured_on_a_move():
    assert len(drawn().to_json()) < 8_000  # no default template inside
    calls = []

    def measured(top_k):
        calls.append(top_k)
        return drawn(top_k)

    made = explore(measured, run_button=True, top_k=slider("top-k", 1, 8, 8))
    made.controls["top_k"].value = 4
    assert calls == [8] and made._state.value == "press Run to measure"
    made._button.click()
    assert calls == [8, 4] and not made._button.disabled and not made._state.value


FIGURE = """
from moelab.lab import charts, records
from moelab.lab.plots import explore, show, slider

def draw(k=1):
    made = records.computed({"variant": "a", "x": [0, 1], "y": [k, 2]})
    words = {"title": "t", "axes": ("x", "y"), "finding": f"it rises to {k}"}
    return charts.lines(made, "x", "y", **words)

show(draw())
explore(draw, k=slider("k", 2, 3, 2))
"""
DRAWING = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()
# Texts that cells print to stderr: 1 if the page has a text only in the code, 2 if it shows it.
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
    assert 'aria-label="y over x. a: 1 at 0,' in page and "Plotly.react" in page
    # Above the slider:
    assert 'aria-label="y over x. a: 2 from 0 to 1' in page and "it rises to 2" in page
    assert "ZeroDivisionError" in page and page.count("make lab</code>, notebook 00_first") == 1
    assert "data:image/svg+xml;base64," in page and "<summary>Code, 11 lines</summary>" in page
    for text, times in STDERR.items():  # a progress bar is dropped, a warning is not
        assert html.unescape(page).count(text) == times
    assert page.count('<a href="index.html">') == 2 and page.count('<a href="01_next.html">') == 3
    # The index has the question and the answer, and says that a cell failed.
    text = (built / "index.html").read_text()
    assert '<a href="00_first.html">Why a &lt; b?</a>' in text and pages.FAILED in text
    assert "By <strong>1</strong>," in text and "Limits" not in text
    assert "<script" not in text and 'href="javascript' not in text


def test_an_index_is_written_again_and_links_other_machines(built, tmp_path, capsys):
    """The index lists pages that were made elsewhere. A damaged description is refused."""
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
        assert "https://github.com/someone/moelab" in text and pages.SMALL not in text
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

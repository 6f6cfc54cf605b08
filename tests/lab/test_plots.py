"""Figures, widgets and the machine's card, without a browser and without a model."""

import re

import ipywidgets
import nbformat
import pytest

from moelab.lab import machine, preset
from moelab.lab.plots import pages, widgets
from moelab.lab.plots import style as figures


def drawn(top_k=8, slots=16):
    if slots < top_k:
        raise ValueError(f"slots {slots} < top_k {top_k}")
    fig = figures.figure(f"top-k {top_k}", "slots", "ms")
    fig.add_scatter(x=[1, 2], y=[top_k, slots], **figures.style(0))
    if top_k < 8:
        fig.add_bar(x=[1], y=[2])
    if slots == 16:
        figures.ceiling(fig, 20, "all")
        fig.data[0].error_y = dict(array=[1, 1])
    return figures.describe(fig, alt=f"a line to {slots}", finding=f"{top_k} of {slots}")


@pytest.fixture
def explorer(capsys):
    return widgets.explore(
        drawn, top_k=widgets.slider("top-k", 1, 8, 8), slots=widgets.choice("slots", (4, 8, 16), 16)
    )


def test_a_slider_redraws_the_live_figure(explorer):
    assert list(explorer.figure.data[0].y) == [8, 16]
    explorer.controls["slots"].value = 8  # as a reader would
    assert list(explorer.figure.data[0].y) == [8, 8]
    assert (
        not explorer.figure.layout.shapes and explorer.figure.data[0].error_y.array is None
    )  # nothing stays of before
    explorer.set(top_k=2, slots=4)  # another number of traces
    assert [t.type for t in explorer.figure.data] == ["scatter", "bar"]
    assert explorer.figure.layout.title.text == "top-k 2"
    assert "2 of 4" in explorer._words.value
    explorer.assert_ok()


def test_an_error_is_shown_and_raised(explorer):
    explorer.set(top_k=8, slots=4)
    assert "slots 4 &lt; top_k 8" in explorer._state.value
    with pytest.raises(ValueError, match="slots 4 < top_k 8"):
        explorer.assert_ok()
    explorer.set(top_k=4)
    explorer.assert_ok()
    with pytest.raises(ValueError, match="goes from 1 to 8, got 9"):
        explorer.set(top_k=9)


def test_with_a_run_button_nothing_is_measured_on_a_move():
    calls = []

    def measured(top_k):
        calls.append(top_k)
        return drawn(top_k)

    explorer = widgets.explore(measured, run_button=True, top_k=widgets.slider("top-k", 1, 8, 8))
    explorer.controls["top_k"].value = 4
    assert calls == [8]
    explorer._button.click()
    assert calls == [8, 4] and not explorer._button.disabled
    assert isinstance(explorer.view, ipywidgets.VBox)


def test_every_figure_says_where_it_was_measured():
    fig = drawn()
    assert machine.card()["date"] in fig.layout.title.subtitle.text
    assert len(fig.to_json()) < 8_000  # no default template inside
    looks = [(s["line"]["dash"], s["marker"]["symbol"]) for s in map(figures.style, range(6))]
    assert len(set(looks)) == 6
    with pytest.raises(ValueError, match="alt text"):
        figures.show(figures.figure("t", "x", "y"))
    figures.ceiling(fig, 2.5, "SSD, 2.5 GB/s")
    assert fig.layout.shapes[-1].y0 == 2.5


def test_check_says_what_to_do(monkeypatch, capsys):
    assert machine.check() in (True, False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 6 and all(line.startswith(("[ok] ", "[fail] ")) for line in lines)
    monkeypatch.setattr(machine, "MIN_MEMORY_NBYTES", 1 << 60)
    assert not machine.check()
    assert "[fail] memory" in (out := capsys.readouterr().out) and "-> " in out


def test_reads_are_counted_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(10 << 20))
    for cold in (True, False):
        assert machine.read_speed(path, cold, readers=3) > 0


def test_preset(monkeypatch, capsys):
    P = preset(tokens=(128, 16), slots=16, modes=["a", "b"])
    assert P.tokens in (128, 16) and P.slots == 16 and P.modes == ["a", "b"]
    assert "preset=" in capsys.readouterr().out


def test_a_page_needs_no_network(tmp_path):
    source = """
from moelab.lab.plots import style as figures
import ipywidgets
figures.show(figures.figure("t", "x", "y").add_scatter(y=[1, 2]), alt="a line", finding="it rises")
display(ipywidgets.IntSlider())
"""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell("1 / 0")]
    )
    nbformat.write(notebook, tmp_path / "n.ipynb")
    before = (tmp_path / "n.ipynb").read_bytes()
    assert (
        pages.main(str(tmp_path), str(tmp_path / "build")) == 1
    )  # the cell that fails is told, and shown
    page = (tmp_path / "build" / "n.html").read_text()
    assert 'aria-label="a line"' in page and "Plotly.newPlot" in page and "it rises" in page
    assert "ZeroDivisionError" in page and "Live controls" in page
    assert not re.search(r"<(script|link|img)[^>]* (src|href)=.https?:", page)
    assert (tmp_path / "n.ipynb").read_bytes() == before

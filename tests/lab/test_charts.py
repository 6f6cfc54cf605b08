"""Charts of a table."""

import pytest

from moelab.lab import charts, records
from moelab.lab.plots import style


def samples(record=None):
    """``a`` takes 1 to 3 s over 4 slots, ``b`` twice as long over 4 and 8."""
    rows = [
        {"variant": name, "round": i, "slots": n, "seconds": (i + 1.0) * times * n / 4}
        for name, times, slots in (("a", 1, (4,)), ("b", 2, (4, 8)))
        for n in slots
        for i in range(3)
    ]
    header = {"machine": None, "settings": {"model": "tiny", "cache_state": "warm"}, "rows": rows}
    if record:
        header |= {"record": record, "machine": CARD}
    return records.table(header)


CARD = {"cpu": "Z80", "gpu": "H9", "backend": "CUDA", "cores": 2, "memory_nbytes": 2**34}
CARD |= {"os": "Linux 6", "mlx": "1", "mlx-lm": "2", "moelab": "3", "date": "2026-01-01"}
WORDS = {"title": "t", "finding": "found"}


def test_bars_follow_from_the_columns():
    fig = charts.bars(samples(), "seconds * 1e3", axis="ms", ceilings={"limit": 9000.0}, **WORDS)
    assert fig.layout.meta["alt"] == "Bars of ms. a 2000, b 5000."
    note = fig.layout.meta["note"]
    assert "tiny, page cache warm, n=3 to 6" in note and "here: " in note
    assert list(fig.data[0].x) == [2000, 5000] and fig.layout.xaxis.range[1] > 9000
    numbers = samples().assign(drafts=["0", "7", "auto"] * 3)  # names, no places on an axis
    assert charts.bars(numbers, "seconds", "drafts", axis="s", **WORDS).layout.yaxis.type == (
        "category"
    )
    by_slots = charts.bars(samples(), "seconds", "variant", "slots", axis="s", **WORDS)
    assert by_slots.layout.meta["alt"] == "Bars of s. 4: a 2.00, b 4.00. 8: b 8.00."


def test_lines_and_parts_follow_from_the_columns():
    fig = charts.lines(
        samples(), "slots", "seconds", axes=("slots", "s"), ceilings={"top": 9.0}, **WORDS
    )
    assert fig.layout.meta["alt"] == "s over slots. a: 2 at 4. b: 4 at 4, 8 at 8. Line, top: 9."
    assert fig.layout.yaxis.range[1] > 9 and "found" in style.words(fig.layout.meta)
    fig = charts.parts(samples(), {"half": "seconds / 2", "all": "seconds"}, axis="s", **WORDS)
    assert "a: half 1, all 2; b: half 3, all 6" in fig.layout.meta["alt"]


def test_a_flat_line_is_told_in_one_number():
    flat = samples().assign(seconds=0.0)
    fig = charts.lines(flat[flat.variant == "b"], "slots", "seconds", axes=("x", "y"), **WORDS)
    assert "b: 0 from 4 to 8" in fig.layout.meta["alt"]


def test_a_chart_says_which_machine_was_recorded():
    both = records.together({"here": samples(), "there": samples("cuda_x")})
    meta = charts.bars(both, "seconds", panel="source", axis="s", **WORDS).layout.meta
    assert "recorded: H9, CUDA backend" in meta["note"] and "here: " in meta["note"]
    assert any("mlx 1, mlx-lm 2, moelab 3" in line for line in meta["machines"])
    alone = charts.bars(samples("cuda_x"), "seconds", axis="s", **WORDS).layout.meta
    assert "here" not in alone["note"]
    counted = charts.bars(records.computed([{"variant": "a", "x": 1}]), "x", axis="x", **WORDS)
    assert not counted.layout.meta["machines"]  # arithmetic has no machine


def test_a_timeline_has_a_bar_for_each_span():
    rows = [("CPU", "wait", 0.0, 1.0), ("SSD", "read", 0.2, 0.9), ("CPU", "compute", 1.0, 1.5)]
    spans = records.pandas().DataFrame(rows, columns=["lane", "what", "begin_s", "end_s"])
    fig = charts.timeline(spans, axis="ms", **WORDS)
    assert fig.layout.meta["alt"] == "Timeline, ms. wait 1e+03, read 700, compute 500."
    assert [list(bar.base) for bar in fig.data] == [[0], [200], [1000]]


def test_a_table_is_shown_in_html_and_text(monkeypatch):
    shown = []
    monkeypatch.setattr(charts, "display", lambda out, raw: shown.append(out))
    charts.table(records.group(samples(), "seconds"), {"median": "{:.1f} s"})
    assert "<td style='text-align:left'>5.0 s</td>" in shown[0]["text/html"]
    assert shown[0]["text/plain"].splitlines()[1].split()[:2] == ["a", "2.0"]


def test_no_samples_are_an_error():
    with pytest.raises(ValueError, match="expected samples of 'seconds', got none"):
        charts.bars(samples().assign(killed=True), "seconds", axis="s", **WORDS)

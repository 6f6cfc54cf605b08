"""Charts of a table: what they draw, say and where it was measured."""

from moelab.lab import charts, records

CARD = {"cpu": "Z80", "gpu": "H9", "backend": "CUDA", "cores": 2, "memory_nbytes": 2**34}
CARD |= {"os": "Linux 6", "mlx": "1", "mlx-lm": "2", "moelab": "3", "date": "2026-01-01"}
WORDS = {"title": "t", "finding": "found"}


def samples(**header):
    """``a`` takes 1 to 3 s over 4 slots, ``b`` twice as long over 4 and 8."""
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
    assert "recorded: H9, CUDA backend" in meta["note"] and "here: " in meta["note"]
    assert "tiny, page cache warm, n=3 to 6" in meta["note"]
    assert any("mlx 1, mlx-lm 2, moelab 3" in line for line in meta["machines"])
    assert "here" not in charts.bars(recorded, "seconds", axis="s", **WORDS).layout.meta["note"]
    counted = charts.bars(records.computed([{"variant": "a", "x": 1}]), "x", axis="x", **WORDS)
    assert not counted.layout.meta["machines"]  # arithmetic has no machine


def test_a_figure_is_as_high_as_its_bars_and_panels_need():
    def height(n):
        rows = [{"variant": str(v), "panel": p, "s": 1.0} for v in range(n) for p in "pq"]
        made = records.table({"settings": {}, "rows": rows})
        made = charts.bars(made, "s", panel="panel", axis="s", **WORDS).layout
        assert made.meta["narrow"]["height"] > made.height  # panels in a column
        return made.height

    assert height(9) - height(8) == height(3) - height(2) > 0

"""Charts of a table: what they draw, say and where it was measured. Sliders, without a browser."""

import json

import pytest

from moelab.lab import charts, records
from moelab.lab.plots import choice, explore, show, slider, style

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


def drawn(top_k=8, slots=16):
    if slots < top_k:
        raise ValueError(f"slots {slots} < top_k {top_k}")
    fig = style.figure(f"top-k {top_k}", "slots", "ms")
    fig.add_scatter(x=[1, 2], y=[top_k, slots], **style.look(0))
    fig.update_yaxes(range=[0, slots])
    return style.describe(fig, alt=f"a line to {slots}", finding=f"{top_k} of {slots}")


def explorer(**given):
    slots = choice("slots", (4, 8, 16, 17, 32), 16)
    return explore(drawn, **given, top_k=slider("top-k", 1, 8, 8), slots=slots)


def test_a_slider_redraws_the_live_figure(capsys):
    made = explorer()
    assert all(c.continuous_update for c in made.controls.values())  # the function is quick
    made.controls["slots"].value = 8
    shown = json.loads(made._plot.figure)
    assert shown["data"][0]["y"] == [8, 8] and "8 of 8" in made._words.value
    assert "<b>top-k 8</b>" in made._heading.value and not made._state.value


def test_axes_and_the_room_for_a_title_grow_and_never_shrink(capsys):
    made = explorer(extremes=[{"slots": 8}, {"top_k": 1}])
    for slots, top in ((8, 16), (17, 16), (32, 32), (16, 32)):
        made.controls["slots"].value = slots
        assert list(made.figure.layout.yaxis.range) == [0, top]
        assert json.loads(made._plot.figure)["layout"]["yaxis"]["range"] == [0, top]
    made._draw(style.describe(style.figure("a longer title", "x", "y"), "alt", "finding"))
    made.controls["top_k"].value = 2
    assert made._heading.value.count("a longer title") == 1  # hidden: its room stays


def test_an_error_is_shown_and_kept_until_the_next_call(capsys):
    made = explorer()
    made.controls["slots"].value = 4
    assert "slots 4 &lt; top_k 8" in made._state.value and isinstance(made.error, ValueError)
    made.controls["top_k"].value = 4
    assert made.error is None and not made._state.value
    with pytest.raises(ValueError, match="slots 4 < top_k 8"):
        explorer(extremes=[{"slots": 4}])


def test_with_a_run_button_nothing_is_measured_on_a_move_and_a_figure_has_an_alt_text():
    with pytest.raises(ValueError, match="alt text"):
        show(style.figure("t", "x", "y"))
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

"""Figures and sliders, without a browser and without a model."""

import json

import pytest

from moelab.lab.plots import choice, explore, show, slider, style


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


def test_with_a_run_button_nothing_is_measured_on_a_move():
    calls = []

    def measured(top_k):
        calls.append(top_k)
        return drawn(top_k)

    made = explore(measured, run_button=True, top_k=slider("top-k", 1, 8, 8))
    made.controls["top_k"].value = 4
    assert calls == [8] and made._state.value == "press Run to measure"
    made._button.click()
    assert calls == [8, 4] and not made._button.disabled and not made._state.value


def test_a_figure_needs_an_alt_text():
    with pytest.raises(ValueError, match="alt text"):
        show(style.figure("t", "x", "y"))
    assert len(drawn().to_json()) < 8_000  # no default template inside

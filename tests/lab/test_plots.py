"""Figures, widgets and the machine's card, without a browser and without a model."""

import json

import mlx.core as mx
import pytest

from moelab import DATA, StreamConfig, kernels, plan
from moelab.kernels import code
from moelab.lab import charts, check, machine, preset, records
from moelab.lab.plots import choice, explore, show, slider, style


def drawn(top_k=8, slots=16):
    if slots < top_k:
        raise ValueError(f"slots {slots} < top_k {top_k}")
    fig = style.figure(f"top-k {top_k}", "slots", "ms")
    fig.add_scatter(x=[1, 2], y=[top_k, slots], **style.look(0))
    fig.update_yaxes(range=[0, slots])
    return style.describe(fig, alt=f"a line to {slots}", finding=f"{top_k} of {slots}")


def explorer(**given):
    return explore(
        drawn,
        **given,
        top_k=slider("top-k", 1, 8, 8),
        slots=choice("slots", (4, 8, 16, 17, 32), 16),
    )


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
    downward = style.figure("a longer title", "x", "y").update_yaxes(range=[3, 0])
    for wanted in (downward, downward.update_yaxes(range=[2, -9])):
        made._draw(style.describe(wanted, "alt", "finding"))
    assert list(made.figure.layout.yaxis.range) == [32, -9]
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


def test_a_figure_has_a_form_for_a_phone():
    """Its panels stand in a column, and its axes stay as they are."""
    rows = [{"variant": v, "panel": p, "s": 1.0} for v in "ab" for p in ("one", "two")]
    made = records.table({"settings": {}, "rows": rows})
    fig = charts.bars(made, "s", panel="panel", title="t", axis="s", finding="f")
    narrow = fig.layout.meta["narrow"]
    assert fig.layout.xaxis.domain[1] < 0.5 and narrow["xaxis.domain"] == (0, 1)
    assert narrow["yaxis2.domain"][1] < narrow["yaxis.domain"][0]
    assert (
        narrow["height"]
        == fig.layout.height + 2 * charts.BAR + charts.PANEL_TITLE + charts.PANEL_AXIS
    )
    assert narrow["height"] > fig.layout.height and not [key for key in narrow if "range" in key]


def test_every_figure_says_where_it_was_measured():
    fig = drawn()
    card = machine.card()
    where = fig.layout.meta["note"]
    assert card["backend"] in where and where.startswith("here: ")
    assert card["date"] in style.words(fig.layout.meta)
    recorded = style.figure(
        "t", "x", "y", cards=[{**card, "cpu": "Z80", "date": d} for d in "ab"]
    ).layout.meta["note"]
    assert recorded.startswith("recorded: Z80") and "here" not in recorded and ";" not in recorded
    assert len(fig.to_json()) < 8_000  # no default template inside
    looks = [(s["line"]["dash"], s["marker"]["symbol"]) for s in map(style.look, range(6))]
    assert len(set(looks)) == 6
    with pytest.raises(ValueError, match="alt text"):
        show(style.figure("t", "x", "y"))
    style.ceiling(fig, 2.5, "SSD, 2.5 GB/s")
    assert fig.layout.shapes[-1].y0 == 2.5


def test_a_figure_is_as_high_as_its_bars_and_titles_need():
    def height(n, panels=1):
        rows = [
            {"variant": f"a variant with a long name, {i}", "panel": p, "seconds": 1.0}
            for i in range(n)
            for p in range(panels)
        ]
        made = records.table({"settings": {}, "rows": rows})
        words = {"title": "t", "axis": "s", "finding": "f"}
        return charts.bars(made, "seconds", panel="panel", **words).layout.height

    each = height(3) - height(2)
    assert height(9) - height(8) == each > 0
    assert height(8, panels=3) == height(8)  # beside each other
    assert height(8, panels=4) > 2 * 8 * each  # in two rows
    two, nine = (style.figure("t", "x", "y") for _ in range(2))
    two.add_scatter(name="a").add_scatter(name="b")
    for _ in range(9):
        nine.add_scatter(name="a name of some length")
    for fig in (two, nine):
        style.describe(fig, "alt", "finding")
    assert nine.layout.height > two.layout.height  # the legend has lines of its own


def test_check_says_what_to_do(monkeypatch, capsys):
    assert check.check() in (True, False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 6 and all(line.startswith(("[ok] ", "[fail] ")) for line in lines)
    assert any("mlx and fast" in line for line in lines) == kernels.available()
    monkeypatch.setattr(check, "MIN_MEMORY_NBYTES", 1 << 60)
    monkeypatch.setattr(code, "llvm", None)
    assert not check.check()
    assert "[fail] memory" in (out := capsys.readouterr().out) and "-> " in out
    assert "pip install llvmlite" in out or mx.default_device() != mx.cpu


def test_check_plans_a_model(monkeypatch, capsys):
    """The slots that the commands take, with the reason, and what they hold; or why none fit."""
    model = DATA / "models/tiny-moe"
    want = plan(model, StreamConfig(lazy_logits=True))
    assert check.check(model) in (True, False)
    *_, blocks, chosen, held = capsys.readouterr().out.splitlines()
    assert ("blocks in one piece: 8 DecoderLayer, 8 " in blocks) == kernels.available()
    assert chosen.startswith("[ok] tiny-moe, ")
    assert want.reason.partition(". ")[0] in chosen and "available" in chosen
    all_experts = want.num_experts * sum(want.expert_nbytes) / 1e6
    assert f"the slots hold {all_experts:.0f} MB of {all_experts:.0f} MB" in held
    assert f"a token needs {all_experts / 8:.0f} MB" in held
    monkeypatch.setattr("moelab.streaming.plan._memory", lambda: (10**8, 5 * 10**7))
    assert not check.check(model)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("[fail] ") and "expected at least 1" in last
    assert "got 100 MB (50 MB more left to the system) -> Close other programs" in last


def test_reads_are_counted_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(10 << 20))
    for cold, direct in ((True, False), (False, False), (True, True)):
        assert machine.read_speed(path, cold, readers=3, direct=direct) > 0


def test_preset(monkeypatch, capsys):
    P = preset(tokens=(128, 16), slots=16, modes=["a", "b"])
    assert P.tokens in (128, 16) and P.slots == 16 and P.modes == ["a", "b"]
    assert "preset=" in capsys.readouterr().out


def test_the_label_of_a_limit_keeps_off_a_line_that_begins_above_it():
    for start, anchor in ((1.05, "top"), (0.2, "bottom")):  # under the limit, or over it
        rows = [{"x": 1, "y": start}, {"x": 2, "y": 2.0}]
        made = records.table({"settings": {}, "rows": rows})
        words = {"title": "t", "axes": ("x", "y"), "finding": "f"}
        fig = charts.lines(made, "x", "y", None, ceilings={"limit": 1.0}, **words)
        assert fig.layout.annotations[0].yanchor == anchor

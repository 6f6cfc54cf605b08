"""Recorded results, published figures and the views and ladder of notebooks 01 and 02."""

import json

import numpy as np
import pytest
from small import small

from moelab import DATA, StreamConfig, synthesize
from moelab.lab import records as results
from moelab.lab import timing
from moelab.lab.experiments import bench, ladder
from moelab.lab.plots import charts as views
from moelab.lab.plots import style as figures


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer):
    return synthesize.synthesize(
        tmp_path_factory.mktemp("views") / "m", config=small(), tokenizer=tokenizer, progress=False
    )


def test_recorded_results_say_where_they_come_from():
    paths = sorted((DATA / "results").glob("*.json"))
    assert paths
    for path in paths:
        r = results.recorded(path.stem)
        assert path.stat().st_size < 1 << 20, path.name
        assert {"mlx", "date", "backend"} <= r["machine"].keys(), path.name
        assert "/tmp/" not in path.read_text() and "/root/" not in path.read_text(), path.name
    with pytest.raises(FileNotFoundError, match="no such record; there are"):
        results.recorded("nothing")


def test_published_figures_name_their_source():
    assert all(p["source"] for p in results.PUBLISHED.values())


def test_bars_say_every_number_in_words():
    fig = views.bars(
        {"here": {"a": [1.0, 2.0, 3.0], "b": [4.0]}, "there": {"a": [5.0]}},
        "t",
        "ms",
        "found",
        marks=[(1, 9.0, "limit")],
    )
    assert fig.layout.meta["alt"] == "Bars of ms. here: a 2, b 4. there: a 5."
    assert fig.layout.yaxis2.range[1] > 9 and "found" in figures.words(fig)


def test_lines_and_parts_carry_their_words():
    fig = views.lines(
        {"s": ([1, 2], [[1.0], [3.0]])}, "t", "x", "y", "found", ceilings=[(5.0, "top")]
    )
    assert (
        "s: 1 at 1, 3 at 2" in fig.layout.meta["alt"]
        and "top: 5" in fig.layout.meta["alt"]
        and fig.layout.yaxis.range[1] > 5
    )
    fig = views.parts({"here": {"m": {"wait": 0.001, "rest": 0.002}}}, "t", "found")
    assert "m wait 1 ms, rest 2 ms" in fig.layout.meta["alt"]


def test_verdicts_are_one_of_four(capsys):
    with pytest.raises(ValueError, match="expected one of confirmed, refuted"):
        views.verdicts([("A1", "claim", "maybe", "why")])


@pytest.mark.parametrize("top_k", [1, 16])
@pytest.mark.parametrize("bandwidth", [50, 4800])
def test_dispatch_dial_at_its_ends(top_k, bandwidth):
    fig = views.dispatch_dial(D=3072, F=1024)(top_k=top_k, layers=48, bandwidth=bandwidth)
    assert len(fig.data) == 3 and fig.layout.meta["finding"]
    assert all(np.isfinite(t.y).all() for t in fig.data)


def test_the_slower_of_sending_and_moving_sets_the_pace():
    assert views.token_model(3, 10, 30, 40, 1, 100) == pytest.approx(10 * 43 * 30e-6)
    assert views.token_model(3, 10, 0, 40, 1e9, 100) == pytest.approx(10 * 1e9 / 100e9)


def test_ladder(model_path):
    r = bench.bench(
        model_path,
        "resident," + ladder.LADDER,
        StreamConfig(slots=8),
        tokens=3,
        runs=2,
        warmup=1,
        progress=False,
    )
    assert list(ladder.rungs(r)) == ["serial", "batched", "parallel", "slots", "gate+up", "cores"]
    alone = {
        "modes": {m.removesuffix("/streams=1"): r["modes"][m] for m in r["modes"] if m != "fused"},
        "tokens": 3,
    }
    assert list(ladder.rungs(alone)) == ["serial", "batched", "parallel", "slots", "gate+up"], (
        "a GPU's record"
    )
    pieces = ladder.parts(r)
    for mode, name in ladder.RUNGS.items():
        assert sum(pieces[name].values()) == pytest.approx(np.median(ladder.token_s(r, mode)))
    assert pieces["resident"]["waiting for reads"] == 0
    assert ladder.multiples({"a": [2.0], "b": [1.0]}) == {"a": [1.0], "b": [2.0]}
    assert (ladder.read_GBs(r, "serial") > 0).all()


def test_between_prompts():
    def sample(round, seconds):
        return {"round": round, "decode_s": seconds, "counters": {"hit_rate": 0.5}}

    record = {
        "prompts": ["a", "b"],
        "tokens": 1,
        "modes": {
            "fused": {"samples": [sample(0, 1.0), sample(1, 2.0), sample(2, 1.0), sample(3, 2.0)]}
        },
    }
    spread = ladder.between_prompts(record)
    assert spread["between"] == pytest.approx(1.0) and spread["within"] == 0


def test_sweep_and_dial(model_path):
    r = ladder.sweep(model_path, (4, 16), tokens=2, runs=1, warmup=1)
    assert list(r["modes"]) == ["resident", "4 slots", "16 slots"]
    assert r["modes"]["16 slots"]["hit_rate"] >= r["modes"]["4 slots"]["hit_rate"]
    look = ladder.dial(model_path, tokens=2, warmup=1)
    for at in ((1, 4, 1, "cold"), (4, 16, 16, "warm")):
        assert "tokens are the resident model's" in look(*at).layout.meta["finding"]


def test_checkpoint_of_real_layers_is_gone_afterwards(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "DATA", tmp_path / "data")
    big = ladder.checkpoint_of_real_layers(tokenizer, experts=8)
    assert json.loads((big.path / "config.json").read_text())["text_config"]["hidden_size"] == 2048
    big.cleanup()
    assert not big.path.exists() and (tmp_path / "build").is_dir()


def test_medians_of_fresh_and_recorded_timings_alike():
    t = timing.Timing("a", (1.0, 3.0, 2.0))
    assert (
        results.median({"a": t}, "a") == results.median({"a": {"samples_s": [1, 3, 2]}}, "a") == 2
    )

"""Recorded results, published figures and the views and ladder of notebooks 01 and 02."""

import json

import pytest

from moelab import DATA, StreamConfig
from moelab.lab import records as results
from moelab.lab.experiments import exactness, ladder, memory, reads
from moelab.lab.figures import ladder as figures
from moelab.lab.plots import charts, style


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


@pytest.fixture(scope="module")
def gpu():
    return ladder.recorded()


@pytest.fixture(scope="module")
def here(model_path):
    return ladder.measure(model_path, slots=8, tokens=3, runs=2)


def test_a_ladder_has_its_rungs(here, gpu):
    steps = ["serial", "batched", "parallel", "slots", "gate+up"]
    assert all(list(ladder.rungs(r)) == steps for r in (here, gpu.warm, gpu.cold))
    pieces = ladder.parts(here)
    for mode, rung in ladder.RUNGS.items():
        assert sum(pieces[rung].values()) == pytest.approx(
            results.values(here, mode, "token_s").median()
        )
    assert pieces["resident"][ladder.WAITING] == 0
    climb = ladder.multiples(here)
    assert climb["serial"] == 1 and climb["slots"] == pytest.approx(
        results.values(here, "serial", "token_s").median()
        / results.values(here, "stacked", "token_s").median()
    )
    assert 0 <= ladder.waiting_share(here) <= 1


@pytest.mark.parametrize("way", ["in place", "set by slice", "one scatter", "upload"])
def test_slot_writes_have_every_way(way):
    r = ladder.slot_writes(64, 64, K=4, S=8, misses=(0, 2), rounds=1)
    assert {f"{way}, 0 new", f"{way}, 2 new"} <= set(r.timings)


def test_between_prompts():
    varied = ladder.Variation({0: [1.0, 1.0], 1: [0.5, 0.5]}, {0: 0.5, 1: 0.5})
    assert varied.between == pytest.approx(1.0) and varied.within == 0


def test_what_notebook_02_shows(model_path, here, gpu, capsys):
    """Every chart, table and verdict, from measurements of a small model."""
    swept = ladder.sweep(model_path, (4, 16), tokens=2, runs=1, warmup=1)
    hits = swept.groupby("variant").hit_rate.mean()
    assert hits["16 slots"] >= hits["4 slots"]
    prompt = ladder.prompt_reads(model_path, slots=4, tokens=16)
    assert prompt.read == prompt.distinct and prompt.uses == 16 * 4 * 4
    varied = ladder.measure_prompts(model_path, tokens=2, runs=8, slots=8)
    assert len(varied.tok_s) == 8
    long_run = memory.measure(model_path, StreamConfig(slots=8), tokens=4, every=2)
    cold = reads.bench_reads(
        model_path, (1, 2), 1 << 16, 1, kinds=("experts",), with_fio=False, progress=False
    )
    together = ladder.tokens_at_once(64, 64, 2, E=4, tokens=(1, 2), rounds=1)
    shown = [
        figures.published_bars(),
        figures.read_lines(cold, gpu, 1000),
        figures.rung_bars(here, gpu),
        figures.multiple_lines(here, gpu),
        figures.part_bars(here, gpu),
        figures.write_lines(gpu),
        figures.slot_lines(swept, gpu, 16, 16),
        figures.together_lines(together, gpu, (1, 2)),
        figures.prompt_bars(varied, "m"),
        figures.memory_lines(long_run, gpu, "m"),
    ]
    assert all(style.words(fig) for fig in shown)
    notes = [fig.layout.title.subtitle.text for fig in shown]
    assert ["recorded:" in note for note in notes] == [False, *[True] * 7, False, True]
    figures.rung_table(here)
    agree = exactness.agreement(model_path, "serial,fused", StreamConfig(slots=8), tokens=2)
    figures.agreement_table(agree, gpu)
    assert "gate+up" in (out := capsys.readouterr().out) and "bit for bit" in out
    results = figures.Results(here, cold, swept, prompt, varied, long_run)
    rows = figures.verdicts(gpu, results, 16, 16)
    assert [r[0] for r in rows] == ["A1", "A2", "A3", "A5", "A10", "B4", "B5", "B6"]
    assert {r[2] for r in rows} <= set(charts.VERDICTS)


@pytest.mark.parametrize("at", [(1, 4, 1, "cold"), (4, 16, 16, "warm")])
def test_dial(model_path, at):
    look = figures.dial(model_path, tokens=2, warmup=1)
    assert "tokens are the resident model's" in look(*at).layout.meta["finding"]


def test_checkpoint_of_real_layers_is_gone_afterwards(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "DATA", tmp_path / "data")
    big = ladder.checkpoint_of_real_layers(tokenizer, experts=8)
    assert json.loads((big.path / "config.json").read_text())["text_config"]["hidden_size"] == 2048
    big.cleanup()
    assert not big.path.exists() and (tmp_path / "build").is_dir()

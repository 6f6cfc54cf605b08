"""The measurements of notebook 04: records, charts and verdicts."""

import json
from dataclasses import replace

import pytest

from moelab import DATA
from moelab.__main__ import main
from moelab.lab import decode
from moelab.lab.experiments import prefetch
from moelab.lab.figures import prefetch as figures
from moelab.lab.plots import charts
from moelab.repack import repack
from moelab.streaming.trace import Trace

RECORDS = ["cpu_prefetch_tiny_moe", "cpu_prefetch_35b"]


@pytest.fixture(scope="module")
def packed(model_path, tmp_path_factory):
    return repack(model_path, tmp_path_factory.mktemp("packed") / "m", progress=False)


def test_the_command_writes_a_record(model_path, packed, tmp_path):
    out = tmp_path / "prefetch.json"
    sizes = ["--slots", "6", "--tokens", "3", "--runs", "2", "--json", str(out)]
    assert not main(["bench-prefetch", str(model_path), str(packed), *sizes])
    fields = json.loads(out.read_text())
    recorded = json.loads((DATA / "results" / f"{RECORDS[0]}.json").read_text())
    assert fields.keys() == recorded.keys()
    for mine, theirs in zip(fields["variants"], recorded["variants"]):
        assert mine.keys() == theirs.keys()
        assert mine["per_token"].keys() == theirs["per_token"].keys()
        assert [len(steps) for steps in mine["step_s"]] == [3, 3]
    oracle = next(v for v in fields["variants"] if v["prefetch"] == "oracle")["per_token"]
    assert oracle["prefetch_issued"] > 0 and oracle["prefetch_wasted"] == 0


def test_other_tokens_are_an_error(model_path, monkeypatch):
    """A prefetcher that changes what comes out is a bug of the engine, not a result."""
    real, count = decode.decode, [0]

    def wrong(*args, **kwargs):
        sample, count[0] = real(*args, **kwargs), count[0] + 1
        return replace(sample, tokens=[*sample.tokens, count[0]])

    monkeypatch.setattr(prefetch, "decode", wrong)
    with pytest.raises(RuntimeError, match="other tokens than without prefetching"):
        prefetch.measure({"as shipped": model_path}, 6, 2, 1, states=("warm",), progress=False)


def test_pages_are_dropped_before_every_cold_token(model_path, monkeypatch):
    dropped = []
    monkeypatch.setattr(prefetch.oscache, "drop_pages", dropped.append)
    prefetch.measure({"as shipped": model_path}, 6, 3, 1, 2, prefetchers=("none",), progress=False)
    assert dropped == [model_path] * (2 + 3)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("state", prefetch.STATES)
def test_a_chart_of_a_record(name, state):
    record = prefetch.Record.recorded(name)
    fig = figures.chart(record, state)
    assert fig.layout.meta["alt"] and fig.layout.meta["finding"]
    assert f"\n{state} " in prefetch.report(record)
    assert "at most" in figures.bounds(record, state)


def test_verdicts_of_the_record():
    record = prefetch.Record.recorded(RECORDS[0])
    traces = {n: Trace.load(DATA / "traces" / f"{n}.npz") for n in ("code", "prose")}
    rows = figures.verdicts(record, traces)
    assert [r[0] for r in rows] == ["A4", "E2", "E3", "E4"]
    assert {r[2] for r in rows} <= set(charts.VERDICTS)


def test_reuse_is_told_apart():
    traces = {n: Trace.load(DATA / "traces" / f"{n}.npz") for n in ("code", "prose")}
    found = prefetch.reuse(traces)
    for r in found.values():
        assert r.every < r.chance < r.each < r.held[16] < 1
        at = r.slots_for(figures.CLAIMED)
        assert r.held[at - 1] < figures.CLAIMED <= r.held[at]
    assert "code" in figures.reuse_table(found, 16)
    assert figures.reuse_chart(found, 16).layout.meta["alt"]

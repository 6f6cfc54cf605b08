"""The sweep of slots under memory limits: what it measures, that it resumes, what it refuses."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

import moelab
from moelab.lab import limit
from moelab.lab.experiments import sweep
from moelab.lab.experiments.sweep_record import (
    Measured,
    Point,
    RecordedTrace,
    Sample,
    SweepRecord,
    Tokens,
)
from moelab.replay.sizes import ModelSizes
from moelab.streaming.residency.table import EVICTION, SlotTable
from moelab.streaming.trace import Trace

TINY = moelab.DATA / "models" / "tiny-moe"
L, E, K = 8, 64, 8


def trace(T=60, seed=0):
    rng = np.random.default_rng(seed)
    experts = rng.random((T, L, E)).argsort(-1)[..., :K].astype(np.uint16)
    return Trace(experts, np.full(T, "decode"), np.zeros(T, np.int64), E)


def misses(rows, slots):
    """What a table of slots misses on rows ``[T, L, K]``, by token."""
    tables, out = [SlotTable(slots) for _ in range(L)], []
    for row in rows.tolist():
        out.append(0)
        for table, experts in zip(tables, row):
            _, missing = table.choose(experts)
            table.commit(missing)
            out[-1] += len(missing)
    return out


@pytest.mark.parametrize("slots", [0, 16])
def test_a_point_counts_what_the_trace_asks_for(slots):
    t = trace()
    out = sweep.measure(TINY, Point(slots), t, start=50, tokens=Tokens(4, 20, 10, 2))
    rows = t.experts[np.arange(50, 90) % 60]
    expected = misses(rows, slots) if slots else [L * K] * 40
    one = moelab.footprint(TINY).expert_nbytes
    # Decoding: generate_step is a token ahead of what it yields, and three come before the clock.
    for part, first, last in ((out.cold, 0, 4), (out.reads, 20, 30), (out.decode, 34, 36)):
        assert len(part.token_s) == last - first
        assert part.misses == sum(expected[first:last])
        assert part.asked_nbytes == one * sum(expected[first:last])
    assert min(out.reads.token_s) > 0
    # Others may read or drop the same file meanwhile: no more can be said of its pages.
    if out.cold.disk_nbytes[0] is not None and out.resident_before_nbytes == 0:
        assert sum(out.cold.disk_nbytes) > 0
    if out.resident_nbytes is not None:
        assert 0 < out.resident_nbytes <= sum(f.stat().st_size for f in TINY.glob("*.safetensors"))
    assert out.reads.cpu_s > 0
    assert Measured.from_json(json.loads(json.dumps(out.to_json()))) == out


@pytest.mark.parametrize("name", ["cpu_sweep_35b", "cpu_sweep_35b_prose", "cpu_sweep_pinned"])
def test_a_recorded_sweep_is_read_and_written_unchanged(name):
    text = (moelab.DATA / "results" / f"{name}.json").read_text()
    record = SweepRecord.load(moelab.DATA / "results" / f"{name}.json")
    assert json.dumps(record.to_json(), indent=1) + "\n" == text
    assert record.trace.trace.experts.shape[1:] == (record.sizes.L, record.sizes.K)


def test_a_record_of_something_else_is_refused():
    with pytest.raises(ValueError, match="the record of a sweep"):
        sweep.recorded("cpu_reads_35b")


def test_points_start_with_none_and_end_with_what_fits():
    big = [p.slots for p in sweep.points(TINY, [None])]
    assert big[:2] == [0, K] and big[-1] == E and big == sorted(set(big))
    sizes = ModelSizes.of(TINY)
    tight = sizes.least_nbytes + 12 * sizes.slot_nbytes
    under = sweep.points(TINY, [tight, None], policies=tuple(EVICTION), read_ahead=True)
    assert max(p.slots for p in under) == 20 == sizes.fits(tight)
    assert {p.slots for p in under if p.policy == "lfu"} < {
        p.slots for p in under if p.policy == "lru"
    }
    assert {p.slots for p in under if p.read_ahead} == {
        p.slots for p in under if p.limit_nbytes and p.slots
    }
    ahead = [p for p in sweep.points(TINY, [tight, None], oracle=True) if p.prefetch == "oracle"]
    assert [replace(p, prefetch="none") for p in ahead] == sweep.points(TINY, [tight])[1:]
    with pytest.raises(ValueError, match="expected a limit of at least"):
        sweep.points(TINY, [1_000_000])


def test_an_oracle_reads_what_the_trace_asks_for_a_layer_ahead():
    tokens = Tokens(1, 2, 2, 4)
    plain, ahead = (
        sweep.measure(TINY, Point(16, prefetch=p), trace(), start=3, tokens=tokens)
        for p in ("none", "oracle")
    )
    assert plain.decode.tokens == ahead.decode.tokens
    assert ahead.decode.misses < plain.decode.misses / 2, "what is prefetched is a hit"
    assert Point.from_json(Point(16, prefetch="oracle").to_json()).prefetch == "oracle"


def test_it_goes_on_where_it_was_stopped_and_refuses_another_sweep(tmp_path, monkeypatch):
    calls = []
    real = sweep._run_point

    def counted(path, point, *rest):
        calls.append(point)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(path, point, *rest)

    monkeypatch.setattr(sweep, "_run_point", counted)
    file = tmp_path / "sweep.json"
    two = [Point(8), Point(64)]
    given = {"runs": 1, "tokens": Tokens(2, 6, 4, 1), "json_path": file}
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(TINY, two, trace(), **given)
    assert len(json.loads(file.read_text())["samples"]) == 1
    none = sweep.sweep(TINY, two, trace(), **given, seconds=0)
    assert len(none.samples) == 1 and len(calls) == 2
    record = sweep.sweep(TINY, two, trace(), **given)
    assert len(calls) == 3 and record.complete and {p.slots for p in points_of(record)} == {8, 64}
    again = sweep.sweep(TINY, two, trace(), **given)
    assert len(calls) == 3 and again.samples == record.samples
    with pytest.raises(ValueError, match="the same trace"):
        sweep.sweep(TINY, two, trace(seed=1), **given)
    with pytest.raises(ValueError, match="expected a trace"):
        sweep.sweep(TINY, two, Trace(trace().experts[:, :3], trace().phase, trace().tokens, E))

    rows = {r.point.slots: r for r in record.rows()}
    assert rows[64].hit_rate > rows[8].hit_rate and record.same_tokens()
    assert rows[64].asked_per_token < rows[8].asked_per_token
    assert len(rows[8].reads.seconds) == 1 and "8" in sweep.report(record)


def points_of(record):
    return [s.point for s in record.samples]


def test_a_point_that_does_not_fit_is_killed_once_and_said(tmp_path):
    point = Point(16, 60_000_000)
    try:
        record = sweep.sweep(TINY, [point], trace(), 2, Tokens(1, 2, 2, 0))
    except limit.NoLimit as e:
        pytest.skip(str(e))
    assert [s.killed for s in record.samples] == [True] and not record.rows()
    assert "killed" in sweep.report(record)


def test_a_sweep_that_fails_says_why(tmp_path):
    broken = tmp_path / "model"
    broken.mkdir()
    for f in TINY.iterdir():
        if f.is_file():
            os.link(f, broken / f.name) if f.suffix == ".safetensors" else (
                broken / f.name
            ).write_bytes(f.read_bytes())
    with pytest.raises(OSError, match="policy"):
        sweep.sweep(broken, [Point(16, policy="mru")], trace(), runs=1)


def test_where_the_system_does_not_say_what_the_disk_did(monkeypatch):
    # macOS: no /proc/self/io, no advice, and mincore may refuse.
    monkeypatch.setattr(sweep.oscache, "disk_read_nbytes", lambda: None)
    monkeypatch.setattr(sweep.oscache, "cached_nbytes", lambda path: None)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    tokens = Tokens(2, 4, 3, 1)
    out = sweep.measure(TINY, Point(16), trace(), 0, tokens)
    sample = Sample(Point(16), 0, False, "none", {}, 1.0, out)
    kept = RecordedTrace.of(trace())
    record = SweepRecord("tiny", 1, tokens, 0, kept, ModelSizes.of(TINY), samples=[sample])
    assert SweepRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    (row,) = record.rows()
    assert row.reads.median > 0
    assert np.isnan(row.disk_per_token) and np.isnan(row.resident_nbytes)
    assert "nan" in sweep.report(record)

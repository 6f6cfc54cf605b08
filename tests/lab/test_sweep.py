"""The sweep of slots under memory limits: what it measures, that it goes on where it was stopped, what it refuses."""

import json
import os

import numpy as np
import pytest

import moelab
from moelab.lab import limit, machine
from moelab.lab.experiments import sweep
from moelab.streaming.record import Trace
from moelab.streaming.slots import SlotTable

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
            _, missing = table.plan(experts)
            table.commit(missing)
            out[-1] += len(missing)
    return out


@pytest.mark.parametrize("slots", [0, 16])
def test_a_point_counts_what_the_trace_asks_for(slots):
    t = trace()
    out = sweep.measure(
        TINY, sweep.Point(slots), t, start=50, cold=4, warmup=20, reads=10, decode=2
    )
    rows = t.experts[np.arange(50, 90) % 60]
    expected = misses(rows, slots) if slots else [L * K] * 40
    one = moelab.footprint(TINY).expert_nbytes
    # Decoding: generate_step is a token ahead of what it yields, and three come before the clock starts.
    for part, first, last in (("cold", 0, 4), ("reads", 20, 30), ("decode", 34, 36)):
        assert len(out[part]["token_s"]) == last - first
        assert out[part]["misses"] == sum(expected[first:last])
        assert out[part]["asked_nbytes"] == one * sum(expected[first:last])
    assert min(out["reads"]["token_s"]) > 0
    # Others may read or drop the same file meanwhile: no more can be said of its pages.
    if out["cold"]["disk_nbytes"][0] is not None and out["resident_before_nbytes"] == 0:
        assert sum(out["cold"]["disk_nbytes"]) > 0
    if out["resident_nbytes"] is not None:
        assert (
            0 < out["resident_nbytes"] <= sum(f.stat().st_size for f in TINY.glob("*.safetensors"))
        )


def test_only_streamed_layers_are_brought_to():
    with pytest.raises(TypeError, match="slots or buffers"):
        sweep.bring(object(), [1])


def test_residency_of_a_file(tmp_path):
    file = tmp_path / "file"
    with open(file, "wb") as f:
        f.write(os.urandom(3 << 20))
        os.fsync(f)
    if sweep.resident_nbytes(file) is None:
        pytest.skip("mincore does not answer here")
    assert sweep.resident_nbytes(file) == 3 << 20
    if machine.drop_pages(file) == "POSIX_FADV_DONTNEED" and sweep.resident_nbytes(file) < 3 << 20:
        with open(file, "rb", buffering=0) as f:
            os.pread(f.fileno(), 1 << 20, 0)
        assert 1 << 20 <= sweep.resident_nbytes(file) <= 3 << 20


def test_points_start_with_none_and_end_with_what_fits():
    big = [p.slots for p in sweep.points(TINY, [None])]
    assert big[:2] == [0, K] and big[-1] == E and big == sorted(set(big))
    sizes = sweep.sizes_of(TINY)
    tight = sweep.least_nbytes(sizes) + 12 * sizes["slot_nbytes"]
    under = sweep.points(TINY, [tight, None], policies=("lru", "lfu"), ahead=True)
    assert max(p.slots for p in under) == 20 == sweep.fits(sizes, tight)
    assert {p.slots for p in under if p.policy == "lfu"} < {
        p.slots for p in under if p.policy == "lru"
    }
    assert {p.slots for p in under if p.ahead} == {
        p.slots for p in under if p.limit_nbytes and p.slots
    }
    with pytest.raises(ValueError, match="expected a limit of at least"):
        sweep.points(TINY, [1_000_000])


def test_points_of_pinning_take_the_memory_of_the_most_slots(tmp_path):
    one = sweep.sizes_of(TINY)["slot_nbytes"]
    few, many, pinned = sweep.points(TINY, [None], [8, 20], pinned=("code",))
    assert pinned == sweep.Point(
        8, None, "lru", False, 12 * one, "code"
    ) and "pinned by code" in str(pinned)
    feet = [moelab.footprint(TINY, p.config).slots_nbytes for p in (few, many, pinned)]
    assert feet[1] == feet[2] == feet[0] + 12 * one
    out = sweep.measure(TINY, pinned, trace(), start=0, cold=2, warmup=4, reads=4, decode=0)
    assert out["cold"]["misses"] < 2 * L * K, "the pinned are there from the first token on"
    assert (
        sweep.point_of({"slots": 8, "limit_nbytes": None, "policy": "lru", "ahead": False}) == few
    )  # a record from before there was pinning


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
    two = [sweep.Point(8), sweep.Point(64)]
    sizes = dict(runs=1, cold=2, warmup=6, reads=4, decode=1, json_path=file)
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(TINY, two, trace(), **sizes)
    assert len(json.loads(file.read_text())["samples"]) == 1
    none = sweep.sweep(TINY, two, trace(), **sizes, seconds=0)
    assert len(none["samples"]) == 1 and len(calls) == 2
    record = sweep.sweep(TINY, two, trace(), **sizes)
    assert (
        len(calls) == 3
        and record["complete"]
        and {s["slots"] for s in record["samples"]} == {8, 64}
    )
    again = sweep.sweep(TINY, two, trace(), **sizes)
    assert len(calls) == 3 and again["samples"] == record["samples"]
    with pytest.raises(ValueError, match="the same trace"):
        sweep.sweep(TINY, two, trace(seed=1), **sizes)
    with pytest.raises(ValueError, match="expected a trace"):
        sweep.sweep(TINY, two, Trace(trace().experts[:, :3], trace().phase, trace().tokens, E))

    rows = {r["point"].slots: r for r in sweep.summarize(record)}
    assert rows[64]["hit_rate"] > rows[8]["hit_rate"] and rows[64]["same_tokens"]
    assert rows[64]["asked_per_token"] < rows[8]["asked_per_token"]
    assert rows[8]["reads"]["n"] == 1 and "8" in sweep.report(record)


def test_a_point_that_does_not_fit_is_killed_once_and_said(tmp_path):
    point = sweep.Point(16, 60_000_000)
    try:
        record = sweep.sweep(
            TINY,
            [point],
            trace(),
            runs=2,
            cold=1,
            warmup=2,
            reads=2,
            decode=0,
            ways=("cgroup", "systemd-run"),
        )
    except limit.NoLimit as e:
        pytest.skip(str(e))
    assert [s["killed"] for s in record["samples"]] == [True]
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
        sweep.sweep(broken, [sweep.Point(16, policy="mru")], trace(), runs=1)


def test_where_the_system_does_not_say_what_the_disk_did(monkeypatch):
    # macOS: no /proc/self/io, no advice, and mincore may refuse.
    monkeypatch.setattr(sweep, "disk_nbytes", lambda: None)
    monkeypatch.setattr(sweep, "resident_nbytes", lambda path: None)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    sizes = dict(cold=2, warmup=4, reads=3, decode=1)
    out = sweep.measure(TINY, sweep.Point(16), trace(), 0, **sizes)
    sample = {
        "slots": 16,
        "limit_nbytes": None,
        "policy": "lru",
        "ahead": False,
        "round": 0,
        "killed": False,
        "how": "none",
        **out,
    }
    record = {
        **sizes, "model": "tiny", "machine": machine.card(), "trace": {"name": "t"}, "sizes": sweep.sizes_of(TINY),
        "samples": [json.loads(json.dumps(sample))],
    }  # fmt: skip
    (row,) = sweep.summarize(record)
    assert (
        row["reads"]["median"] > 0
        and np.isnan(row["disk_per_token"])
        and np.isnan(row["resident_nbytes"])
    )
    assert "nan" in sweep.report(record)

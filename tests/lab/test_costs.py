"""Costs: what is measured, and what follows from the samples."""

from dataclasses import replace

import families
import numpy as np
import pytest

import moelab
from moelab.lab import records
from moelab.lab.experiments import costs as cost
from moelab.replay import eviction, locality, pagecache
from moelab.replay.costs import Costs


@pytest.mark.parametrize("m", (1, 3, 4))
def test_tokens_made_to_miss(m):
    rows = cost.rows_with_misses(m, 5, 2, 24, 4, np.random.default_rng(0))
    assert rows.shape == (5, 2, 4)
    hit = eviction.held(rows, 24, 4, "lru")
    assert (hit[1:].sum(-1) == 4 - m).all()
    for layer in range(2):
        mine = rows[:, layer][~hit[:, layer]]
        assert len(set(mine.tolist())) == len(mine)
    assert len(cost.rows_with_misses(4, 50, 2, 24, 4, np.random.default_rng(0))) == 6


def test_costs_are_measured(random_tiny_moe):
    samples = records.table(cost.samples_of(random_tiny_moe, tokens=6))
    got = cost.costs_of(samples)
    unknown = {"host_s_per_byte"} | (set() if got.reads_direct else {"direct_s_per_byte"})
    known = {name: v for name, v in vars(got).items() if name not in unknown}
    assert all(np.isfinite(v) and v >= 0 for v in known.values()) and got.overlap <= 1
    assert got.warm_s_per_byte > 0 and got.cold_s_per_byte > 0
    assert got.without_reads().fixed_s == got.held_fixed_s
    with pytest.raises(ValueError, match="copies from the host's memory, got none"):
        got.from_host()
    apart = samples[(samples.what != "expert") & (samples.variant != cost.HELD)]
    counts = apart.groupby(["what", "variant", "misses"]).size()
    assert set(counts) == {6}
    for way in (cost.PAGES, cost.DISK, *([cost.DIRECT] if got.reads_direct else [])):
        assert set(counts["reads", way].index) == {1, 2, 4, 8}
    assert samples.attrs["settings"]["E"] == 64
    nbytes = moelab.footprint(random_tiny_moe).expert_nbytes
    t = locality.synthesize(locality.Locality((0.7,), (0.3,), (3.0,)), 60, 8, 64, 8)
    assert pagecache.replay(t, 1e9, 8, expert_nbytes=nbytes, costs=got).token_s.min() >= got.fixed_s
    with pytest.raises(ValueError, match="expected mode stacked or fused, got 'buffers'"):
        cost.measure_costs(random_tiny_moe, moelab.StreamConfig(mode="buffers"))


@pytest.mark.parametrize("disturbed", (True, False))
def test_a_busy_machine_is_said(disturbed, random_tiny_moe, monkeypatch, capsys):
    record = cost.samples_of(random_tiny_moe, tokens=4)
    record["load"] = {"disturbed": disturbed, "cores_of_others": 1.5}
    monkeypatch.setattr(cost, "samples_of", lambda *_: record)
    cost.measure_costs(random_tiny_moe)
    assert ("other programs used 1.5 cores" in capsys.readouterr().err) == disturbed


@pytest.mark.parametrize("top_k", (1, 3, 7, 8))
def test_costs_of_few_experts(top_k, tmp_path):
    path = families.write_checkpoint("qwen3_moe", tmp_path / "m", "affine4")
    E = moelab.footprint(path).num_experts
    if top_k == E:
        with pytest.raises(ValueError, match=f"more experts than a token needs.*got {E} and {E}"):
            cost.measure_costs(path, moelab.StreamConfig(top_k=E, slots=E))
        return
    got = vars(cost.measure_costs(path, moelab.StreamConfig(top_k=top_k), tokens=4))
    for name in ("direct_s_per_byte", "host_s_per_byte"):  # nan where the machine has no such way
        got.pop(name)
    assert all(np.isfinite(v) and v >= 0 for v in got.values())


def test_costs_follow_from_the_samples():
    """Made-up samples on exact lines, with half of the shorter side hidden, or a quarter."""

    def line(call_s, byte_s):
        return {m: call_s + m * 10 * byte_s for m in (1, 4)}

    lines = {cost.PAGES: line(1e-5, 1e-6), cost.DISK: line(1e-4, 1e-5)}
    lines[cost.DIRECT] = line(2e-5, 9e-6)
    rows = [("reads", v, m, s) for v, reads in lines.items() for m, s in reads.items()] * 3
    hit_s, experts_s = 0.01, 4 * 1e-4
    for variant, hidden in ((cost.DISK, 0.5), (cost.DIRECT, 0.25)):
        reads_s = lines[variant][4]
        miss_s = hit_s + 2 * (reads_s - hidden * min(reads_s, experts_s))
        rows.append(("token", variant, 4, miss_s))
    rows += [("token", "slots", 0, hit_s), ("expert", "slots", 0, 1e-4)]
    rows += [("token", cost.OWN, 0, 0.8 * hit_s)]  # in one piece: the rest of a token takes less
    rows += [("token", cost.HELD, 0, 0.7 * hit_s), ("prompt", cost.HELD, 0, 0.256)]
    rows += [("token", cost.HOST, m, 0.7 * hit_s + m * 2e-5) for m in (0.5, 1.5)]  # L experts each
    names = "what", "variant", "misses", "seconds"
    settings = {"L": 2, "K": 4, "expert_nbytes": 10}

    def costs_of(rows):
        record = {"settings": settings, "rows": [dict(zip(names, r)) for r in rows]}
        return cost.costs_of(records.table(record))

    want = Costs(0.8 * hit_s - 2 * experts_s, 1e-4, 1e-6, 1e-5, 1e-5, 1e-4, 0.5, 9e-6, 2e-5, 0.25)
    want = replace(want, held_fixed_s=0.7 * hit_s - 2 * experts_s, host_s_per_byte=1e-6)
    want = replace(want, prompt_token_s=0.256 / cost.PROMPT)
    got = costs_of(rows)
    assert vars(got) == pytest.approx(vars(want))
    from_host = got.from_host()
    assert (from_host.fixed_s, from_host.warm_call_s) == (got.held_fixed_s, 0)
    assert from_host.cold_s_per_byte == from_host.warm_s_per_byte == got.host_s_per_byte
    free = got.without_arithmetic()
    assert (free.fixed_s, free.expert_s, free.overlap, free.direct_overlap) == (0, 0, 0, 0)
    assert free.cold_s_per_byte == got.cold_s_per_byte
    assert got.faster_disk(2).direct_s_per_byte == got.direct_s_per_byte / 2
    past = vars(got.past_the_page_cache())
    assert [past[f"cold_{n}"] for n in ("s_per_byte", "call_s")] == pytest.approx([9e-6, 2e-5])
    without = costs_of([r for r in rows if r[1] != cost.DIRECT])
    assert not without.reads_direct
    with pytest.raises(ValueError, match="costs of reads past the page cache, got none"):
        without.past_the_page_cache()

"""Costs: what is measured, and what follows from the samples."""

import families
import numpy as np
import pytest

import moelab
from moelab.lab.experiments import costs as cost
from moelab.replay import eviction, locality, pagecache
from moelab.replay.costs import Costs, CostSamples


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
    samples = cost.measure_samples(random_tiny_moe, tokens=6)
    got = samples.costs()
    assert all(np.isfinite(v) and v >= 0 for v in vars(got).values()) and got.overlap <= 1
    assert got.warm_s_per_byte > 0 and got.cold_s_per_byte > 0
    assert set(samples.warm) == set(samples.cold) == {1, 2, 4, 8}
    every = (*samples.warm.values(), *samples.cold.values(), samples.hit, samples.miss)
    assert all(len(s) == 6 for s in every)
    nbytes = moelab.footprint(random_tiny_moe).expert_nbytes
    t = locality.synthesize(locality.Locality((0.7,), (0.3,), (3.0,)), 60, 8, 64, 8)
    assert pagecache.replay(t, 1e9, 8, expert_nbytes=nbytes, costs=got).token_s.min() >= got.fixed_s
    with pytest.raises(ValueError, match="expected mode stacked or fused, got 'buffers'"):
        cost.measure_costs(random_tiny_moe, moelab.StreamConfig(mode="buffers"))


@pytest.mark.parametrize("top_k", (1, 3, 7, 8))
def test_costs_of_few_experts(top_k, tmp_path):
    path = families.write_checkpoint("qwen3_moe", tmp_path / "m", "affine4")
    E = moelab.footprint(path).num_experts
    if top_k == E:
        with pytest.raises(ValueError, match=f"more experts than a token needs.*got {E} and {E}"):
            cost.measure_costs(path, moelab.StreamConfig(top_k=E, slots=E))
        return
    got = cost.measure_costs(path, moelab.StreamConfig(top_k=top_k), tokens=4)
    assert all(np.isfinite(v) and v >= 0 for v in vars(got).values())


def test_costs_follow_from_the_samples():
    """Made-up samples on two exact lines, with half of the shorter side hidden."""
    warm = {m: [1e-5 + m * 10 * 1e-6] * 3 for m in (1, 4)}
    cold = {m: [1e-4 + m * 10 * 1e-5] * 3 for m in (1, 4)}
    reads_s, experts_s = 1e-4 + 4 * 10 * 1e-5, 4 * 1e-4
    hit_s = 0.01
    miss_s = hit_s + 2 * (reads_s - 0.5 * min(reads_s, experts_s))
    samples = CostSamples(2, 4, 10, warm, cold, [hit_s], [miss_s], 1e-4)
    want = Costs(hit_s - 2 * experts_s, 1e-4, 1e-6, 1e-5, 1e-5, 1e-4, 0.5)
    assert vars(samples.costs()) == pytest.approx(vars(want))
    free = want.without_arithmetic()
    assert (free.fixed_s, free.expert_s, free.overlap) == (0, 0, 0)
    assert free.cold_s_per_byte == want.cold_s_per_byte
    assert want.all_cached().cold_call_s == want.warm_call_s
    assert Costs.median([want, want.faster_disk(2), want.faster_disk(4)]) == want.faster_disk(2)

"""Eviction policies against slow references, exhaustive search and a driven model."""

from functools import cache
from itertools import combinations

import mlx.core as mx
import numpy as np
import pytest
from committed import ROOT
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab.lab import records
from moelab.lab.arguments import Evicting
from moelab.lab.route import route_by
from moelab.replay import eviction, locality
from moelab.streaming.model import load_model
from moelab.streaming.residency import table as slots
from moelab.streaming.residency.table import SlotTable


def made(T=60, L=3, E=16, K=4, seed=0, zipf=0.7, sticky=0.3, memory=3.0):
    return locality.synthesize(locality.Locality((zipf,), (sticky,), (memory,)), T, L, E, K, seed)


@pytest.mark.parametrize("S", (10, 24, 56))
def test_the_default_reads_less_than_lru_in_each_trace_that_we_have(S):
    for path in (ROOT / "data" / "traces").glob("*.npz"):
        experts = moelab.Trace.load(path).experts.astype(int)
        hits = {p: eviction.held(experts, 64, S, p)[64:].sum() for p in ("lru", "lrfu")}
        assert hits["lrfu"] > hits["lru"], path


def fewest_misses(rows, S):
    """By trying every choice."""

    @cache
    def best(i, content):
        if i == len(rows):
            return 0
        need = frozenset(rows[i])
        missing = len(need - content)
        others = content - need
        room = min(len(others), S - len(need))
        return missing + min(
            best(i + 1, need | frozenset(keep)) for keep in combinations(sorted(others), room)
        )

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("S", (2, 3, 4))
def test_belady_is_the_best_there_is(seed, S):
    t = made(T=14, L=1, E=7, K=2, seed=seed)
    hit = eviction.held(t.experts, 7, S, "belady")
    assert (~hit).sum() == fewest_misses(tuple(map(tuple, t.experts[:, 0].tolist())), S)


@pytest.mark.parametrize("policy", eviction.policies())
def test_every_policy_on_a_recorded_trace(policy):
    t = locality.recorded_trace("code").decode
    rate = [eviction.held(t.experts, 64, S, policy).mean() for S in (8, 16, 32, 64)]
    best = [eviction.held(t.experts, 64, S, "belady").mean() for S in (8, 16, 32, 64)]
    assert (np.array(rate) <= np.array(best) + 1e-12).all()
    if policy == "none":
        assert rate == [0] * 4
        return
    seen = 1 - sum(len(np.unique(t.experts[:, i])) for i in range(8)) / t.experts.size
    assert rate[-1] == pytest.approx(seen)  # with every slot only the first use misses
    if policy == "lru":
        want = locality.lru_hit_rate(t).mean(0)[[8, 16, 32, 64]]
        np.testing.assert_allclose(rate, want, atol=0.003)


def test_what_is_refused():
    """The replay has policies that the engine does not have."""
    with pytest.raises(ValueError, match="slots: expected at least 4 .* got 3"):
        eviction.held(made().experts, 16, 3, "lru")
    with pytest.raises(ValueError, match="distinct experts"):
        eviction.held(np.zeros((2, 1, 4), np.uint16), 16, 8)
    for policy in ("s3-fifo", "belady", "none"):
        with pytest.raises(ValueError, match="policy: expected one of lru, lfu, lrfu.* got "):
            SlotTable(4, policy)
    with pytest.raises(ValueError, match="policy: expected one of lru.* got 'mru'"):
        eviction.held(made().experts, 16, 8, "mru")


@pytest.mark.parametrize("policy", ("lru", "lfu", "lrfu", "s3-fifo", "belady"))
def test_the_record_of_notebook_04_is_replayed_again(policy):
    samples, t = records.read("cpu_locality"), locality.recorded_trace("code").decode
    for row in samples[(samples.policy == policy) & (samples.text == "code")].itertuples():
        assert eviction.held(t.experts, 64, row.slots, policy)[64:].sum() == row.hits, row.slots


def test_the_policy_of_the_engine():
    policies = [moelab.StreamConfig(source=source).policy for source in ("disk", "host")]
    assert policies[1] in slots.GPU_POLICIES, "a GPU chooses slots by itself"
    assert policies == ["lrfu", "lru"] and Evicting(source="host", policy="lfu").policy == "lfu"


@pytest.mark.parametrize("policy", slots.EVICTION)
def test_hits_are_those_of_a_driven_model(policy, random_tiny_moe):
    t = made(T=30, L=8, E=64, K=8)
    model, _ = load_model(random_tiny_moe, Evicting(slots=14, policy=policy))
    with model, route_by(model, t.experts[:, None]):
        cache = make_prompt_cache(model)
        for i in range(len(t)):
            mx.eval(model(mx.array([[i]]), cache=cache))
        hits = moelab.stats(model).decode.hits
    assert hits == eviction.held(t.experts, 64, 14, policy).sum()

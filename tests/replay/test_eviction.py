"""Eviction policies against slow references, exhaustive search and a driven model."""

from functools import cache
from itertools import combinations

import mlx.core as mx
import numpy as np
import pytest
from committed import ROOT
from mlx_lm.models.cache import make_prompt_cache

import moelab
from moelab.__main__ import parse
from moelab.commands.stream_options import streaming_given
from moelab.lab import records
from moelab.lab.arguments import parse_modes
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


def test_too_few_slots_and_an_expert_twice():
    with pytest.raises(ValueError, match="slots: expected at least 4 .* got 3"):
        eviction.held(made().experts, 16, 3, "lru")
    with pytest.raises(ValueError, match="distinct experts"):
        eviction.held(np.zeros((2, 1, 4), np.uint16), 16, 8)


@pytest.mark.parametrize("policy", ("lru", "lfu", "lrfu", "s3-fifo", "belady"))
def test_the_record_of_notebook_04_is_replayed_again(policy):
    samples = records.read("cpu_locality")
    for _, row in samples[(samples.policy == policy) & (samples.text == "code")].iterrows():
        t = locality.recorded_trace("code").decode
        assert eviction.held(t.experts, 64, row.slots, policy)[64:].sum() == row.hits, row.slots


def test_the_policy_that_auto_stands_for():
    assert slots.policy_of("auto", "host") in slots.GPU_POLICIES, "a GPU chooses slots by itself"
    assert slots.policy_of("auto", "disk") == "lrfu" and slots.policy_of("lfu", "host") == "lfu"


def test_a_policy_is_added_in_one_line(monkeypatch, random_tiny_moe):
    """A use counts half with each later call: all that know a policy take it."""
    monkeypatch.setitem(slots.EVICTION, "half", 0.5)
    table = SlotTable(3, "half")
    for experts in ([0], [0], [1], [0], [1], [2]):
        table.commit(table.choose(experts)[1])
    assert table.reserve([3]) and set(table.slot_of) == {1, 2}, "0 was used most, but earlier"

    args = parse(["generate", "M", "--prompt", "x", "--slots", "14", "--policy", "half"])
    found = streaming_given(args)
    assert found == moelab.StreamConfig(slots=14, policy="half", lazy_logits=True)
    assert parse_modes("fused/policy=half")["fused/policy=half"].policy == "half"
    hits, want = hits_of_a_model(random_tiny_moe, "half")
    assert hits == want


def test_an_unknown_policy_is_refused():
    for policy in ("s3-fifo", "belady", "none"):  # the replay has them, the engine does not
        with pytest.raises(ValueError, match="policy: expected one of lru, lfu, lrfu.* got "):
            SlotTable(4, policy)
    with pytest.raises(ValueError, match="policy: expected one of lru.* got 'mru'"):
        eviction.held(made().experts, 16, 8, "mru")


def hits_of_a_model(path, policy):
    """Hits of a model that is driven by a trace, and those of its replay."""
    t = made(T=30, L=8, E=64, K=8)
    model, _ = load_model(path, moelab.StreamConfig(slots=14, policy=policy))
    with model, route_by(model, t):
        cache = make_prompt_cache(model)
        for i in range(len(t)):
            mx.eval(model(mx.array([[i]]), cache=cache))
        hits = moelab.stats(model).decode.hits
    return hits, eviction.held(t.experts, 64, 14, policy).sum()


@pytest.mark.parametrize("policy", slots.EVICTION)
def test_hits_are_those_of_a_driven_model(policy, random_tiny_moe):
    hits, want = hits_of_a_model(random_tiny_moe, policy)
    assert hits == want

"""Costs: what is measured, and what follows from the samples."""

import numpy as np
import pytest

import moelab
from moelab.lab import records
from moelab.lab.experiments import costs as cost
from moelab.replay import eviction
from moelab.replay.costs import Costs


def test_tokens_made_to_miss():
    rows = cost.rows_with_misses(3, 5, 2, 24, 4, np.random.default_rng(0))
    hit = eviction.held(rows, 24, 4, "lru")
    assert rows.shape == (5, 2, 4) and (hit[1:].sum(-1) == 4 - 3).all()
    for layer in range(2):  # none twice, or the page cache would have it
        assert np.unique(rows[:, layer][~hit[:, layer]], return_counts=True)[1].max() == 1


def test_costs_are_measured_and_a_busy_machine_is_said(moe, monkeypatch, capsys):
    with pytest.raises(ValueError, match="more experts than a token needs.*got 8 and 8"):
        cost.samples_of(moe, moelab.StreamConfig(top_k=8, slots=8))
    for top_k, misses, disturbed in ((1, {1}, True), (4, {1, 2, 4}, False), (7, {1}, False)):
        record = cost.samples_of(moe, moelab.StreamConfig(top_k=top_k), tokens=4)
        record["load"] = {"disturbed": disturbed, "cores_of_others": 1.5}
        monkeypatch.setattr(cost, "samples_of", lambda *_, made=record, **__: made)
        costs = cost.measure_costs(moe)
        monkeypatch.undo()
        assert ("other programs used 1.5 cores" in capsys.readouterr().err) is disturbed
        unknown = {"host_s_per_byte"} | (set() if costs.reads_direct else {"direct_s_per_byte"})
        assert all(0 <= s < np.inf for name, s in vars(costs).items() if name not in unknown)
        assert costs.warm_s_per_byte > 0 and costs.cold_s_per_byte > 0 and costs.overlap <= 1
        counts = records.table(record).groupby(["what", "variant"]).misses.unique().map(set)
        for way in (cost.PAGES, cost.DISK, *[cost.DIRECT] * costs.reads_direct):
            assert counts["reads", way] == misses


def test_costs_follow_from_the_samples():
    """Made of known costs: half of the shorter of reads and arithmetic is hidden, or a quarter."""
    L, K, nbytes, hit_s = 2, 4, 10, 0.01
    own = {"fixed_s": 7e-3, "held_fixed_s": 6e-3, "expert_s": 1e-4, "prompt_token_s": 1e-3}
    warm = {"warm_call_s": 1e-5, "warm_s_per_byte": 1e-6}
    cold = {"cold_call_s": 1e-4, "cold_s_per_byte": 1e-5, "overlap": 0.5}
    direct = {"direct_call_s": 2e-5, "direct_s_per_byte": 9e-6, "direct_overlap": 0.25}
    want = Costs(**own, **warm, **cold, **direct, host_s_per_byte=1e-6)
    experts_s, rows = K * want.expert_s, [("expert", "slots", 0, want.expert_s)]
    for way, known in {cost.PAGES: warm, cost.DISK: cold, cost.DIRECT: direct}.items():
        call_s, byte_s, *hidden = known.values()
        rows += [("reads", way, m, call_s + m * nbytes * byte_s) for m in (1, K)]
        for share in hidden:
            reads_s = rows[-1][-1]
            seconds = hit_s + L * (reads_s - share * min(reads_s, experts_s))
            rows.append(("token", way, K, seconds))
    held_s, prompt_s = want.held_fixed_s + L * experts_s, cost.PROMPT * want.prompt_token_s
    rows += [("token", "slots", 0, hit_s), ("token", cost.OWN, 0, want.fixed_s + L * experts_s)]
    rows += [("token", cost.HELD, 0, held_s), ("prompt", cost.HELD, 0, prompt_s)]
    rows += [("token", cost.HOST, m, held_s + L * nbytes * 1e-6) for m in (0.5, 1.5)]
    names = "what", "variant", "misses", "seconds"
    record = {"settings": {"L": L, "K": K, "expert_nbytes": nbytes}}
    record["rows"] = [dict(zip(names, row)) for row in rows]
    assert vars(cost.costs_of(record)) == pytest.approx(vars(want))
    record["rows"] = [r for r in record["rows"] if r["variant"] not in (cost.DIRECT, cost.HOST)]
    without = cost.costs_of(record)
    assert not without.reads_direct and np.isnan(without.host_s_per_byte)

"""Advice from a replay: it finds the best setting where that is known, says why, and refuses what cannot run."""

from dataclasses import replace

import numpy as np
import pytest

import moelab.lab
from moelab.lab import advice, pagecache, routing, sweep

advise = moelab.lab.advise
TINY = moelab.DATA / "models" / "tiny-moe"
SIZES = {
    "checkpoint_nbytes": 1_900_000_000, "backbone_nbytes": 110_000_000, "expert_nbytes": 1_770_000, "slot_nbytes": 7_900_000,
    "L": 4, "E": 256, "K": 8,
}  # fmt: skip
READS = pagecache.Costs(0.0, 0.0, 1e-10, 1e-9)
FLAT = routing.Locality((0.3,) * 4, (0.3,) * 4, (1.5,) * 4)


def settings(memory, costs, slots, locality=FLAT):
    trace = routing.synthesize(locality, 200, 4, 256, 8)
    return advice.replays(SIZES, memory, trace, costs, [(n, "lru") for n in slots], 100)


def test_where_all_are_as_fast_it_takes_the_one_that_moves_least():
    slow = replace(READS, fixed_s=10.0)
    assert advice.pick(settings(1.5e9, slow, [8, 60, 150])) == (150, "lru")


def test_it_takes_an_end_of_the_ridge_and_not_its_top():
    s = settings(1.6e9, READS, [8, 80, 160])
    ms = {n: r.token_s.mean() for (n, _), r in s.items()}
    assert ms[80] > max(ms[8], ms[160])  # what is in a slot lies in the page cache too
    assert advice.pick(s)[0] == min(ms, key=ms.get) != 80


def test_free_copies_from_the_page_cache_and_a_slow_disk_move_the_choice():
    free = replace(READS, warm_s_per_byte=0.0)
    memory = 1.9e9  # nearly all of the file fits in the page cache, while slots take more than the file's own bytes
    few, many = (settings(memory, free, [8, 190]).values())
    assert few.token_s.mean() < many.token_s.mean()
    dear = replace(READS, warm_s_per_byte=1e-9)
    few, many = (settings(memory, dear, [8, 190]).values())
    assert few.token_s.mean() > many.token_s.mean()


def test_advice_for_a_model_says_what_and_why():
    costs = pagecache.Costs(5e-3, 1e-4, 1e-10, 1e-9, overlap=0.5)
    a = advise(TINY, memory=300e6, costs=costs, gain=3.0)
    assert 8 <= a.config.slots <= 64 and a.config.policy in advice.POLICIES and a.config.prefetch == "none"
    assert a.token_s == pytest.approx(a.settings[a.config.slots, a.config.policy].token_s.mean())
    assert a.token_s <= 1.02 * min(r.token_s.mean() for r in a.settings.values())
    text = str(a)
    assert " <" in text and "prefetch" in text and "one piece" in text and f"slots={a.config.slots}" in text
    moelab.StreamConfig(**{k: getattr(a.config, k) for k in ("mode", "slots", "policy", "prefetch")})


def test_a_repack_is_advised_only_where_it_pays():
    costs = pagecache.Costs(0.0, 0.0, 1e-10, 1e-8)
    tight = sweep.least_nbytes(sweep.sizes_of(TINY)) + 1e6
    assert advise(TINY, tight, costs=costs, gain=2.0, skip=0).layout == "packed"
    assert advise(TINY, tight, costs=costs, gain=1.0, skip=0).layout == "as it is"


def test_what_cannot_run_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="expected at least .* GB of memory"):
        advise(TINY, memory=50e6, costs=READS, gain=1.0)
    with pytest.raises(ValueError, match="expected slots from 8"):
        advise(TINY, memory=400e6, costs=READS, slots=[4], gain=1.0)


def test_costs_and_the_gain_of_one_piece_are_measured_where_they_are_not_given():
    a = advise(TINY, memory=400e6, slots=[16, 64], policies=("lru",))
    assert a.token_s > 0 and np.isfinite(a.token_s) and len(a.settings) == 2

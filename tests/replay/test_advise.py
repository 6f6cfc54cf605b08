"""Advice from a replay: it finds the best setting where that is known, says why, and refuses what cannot run."""

from dataclasses import replace

import numpy as np
import pytest

import moelab.lab
from moelab.lab import records as results
from moelab.lab.experiments import advise as advice
from moelab.lab.experiments import sweep
from moelab.repack import repack
from moelab.replay import locality as routing
from moelab.replay import pagecache

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
    few, many = settings(memory, free, [8, 190]).values()
    assert few.token_s.mean() < many.token_s.mean()
    dear = replace(READS, warm_s_per_byte=1e-9)
    few, many = settings(memory, dear, [8, 190]).values()
    assert few.token_s.mean() > many.token_s.mean()


def test_advice_for_a_model_says_what_and_why():
    costs = pagecache.Costs(5e-3, 1e-4, 1e-10, 1e-9, overlap=0.5)
    a = advise(TINY, memory=300e6, costs=costs, gain=3.0)
    assert (
        8 <= a.config.slots <= 64
        and a.config.policy in advice.POLICIES
        and a.config.prefetch == "none"
    )
    assert a.token_s == pytest.approx(a.settings[a.config.slots, a.config.policy].token_s.mean())
    assert a.token_s <= 1.02 * min(r.token_s.mean() for r in a.settings.values())
    text = str(a)
    assert (
        " <" in text
        and "prefetch" in text
        and "one piece" in text
        and f"slots={a.config.slots}" in text
    )
    moelab.StreamConfig(
        **{k: getattr(a.config, k) for k in ("mode", "slots", "policy", "prefetch")}
    )


def test_a_repack_is_advised_only_where_it_pays():
    costs = pagecache.Costs(0.0, 0.0, 1e-10, 1e-8)
    tight = sweep.least_nbytes(sweep.sizes_of(TINY)) + 1e6
    assert advise(TINY, tight, costs=costs, gain=2.0, skip=0).layout == "packed"
    assert advise(TINY, tight, costs=costs, gain=1.0, skip=0).layout == "as it is"


@pytest.mark.parametrize(("name", "L"), [("cpu_prefetch_tiny_moe", 8), ("cpu_prefetch_35b", 4)])
def test_a_look_ahead_is_advised_where_the_recorded_runs_gained_by_it(name, L):
    """From each run without prefetch, what it waited for and what was foretold; asking takes what it took on that machine, 0.16 ms a layer."""
    by = {(v["state"], v["layout"], v["prefetch"]): v for v in results.recorded(name)["variants"]}
    advised = {}
    for (state, layout, prefetch), v in by.items():
        if prefetch == "none":
            token_s, wait_s, c = (
                v["token_s"]["median"],
                v["per_token"]["wait_s"],
                by[state, layout, "lookahead"]["per_token"],
            )
            missed = c["prefetch_used"] + c["misses"]
            part = {
                "copies": 0.0,
                "disk": wait_s,
                "hidden": 0.0,
                "fixed": token_s - wait_s,
                "experts": 0.0,
            }
            foretold = c["prefetch_used"] / missed, c["prefetch_wasted"] / missed, L * 0.16e-3
            got, saved_s, _ = advice._prefetch(None, 16, layout, part, token_s, foretold)
            if got == "lookahead":
                advised[state, layout] = token_s / (token_s - saved_s)
            else:
                assert saved_s == 0
    if name == "cpu_prefetch_35b":  # it routes at random
        assert not advised
        return
    gained = (
        by["cold", "packed", "lookahead"]["ratio"]["median"]
        / by["cold", "packed", "none"]["ratio"]["median"]
    )
    assert (
        list(advised) == [("cold", "packed")] and 1.03 < advised["cold", "packed"] <= gained < 1.1
    )


def test_prefetch_and_layout_are_advised_together(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sweep, "SPARE_NBYTES", 0
    )  # else the page cache always has room for all of so small a file
    packed = repack(TINY, tmp_path / "packed", progress=False)
    trace = routing.synthesize(FLAT, 120, 8, 64, 8)
    costs = pagecache.Costs(1e-2, 5e-5, 1e-9, 4e-9)
    memory = sweep.least_nbytes(sweep.sizes_of(TINY)) + 4e6
    good, bad = (0.7, 0.1, 1e-3), (0.4, 0.4, 1e-3)
    plain = advise(TINY, memory, trace=trace, costs=costs, gain=1.0, foretold=good)
    assert (plain.layout, plain.config.prefetch) == (
        "as it is",
        "none",
    ) and "several pieces" in str(plain)
    both = advise(TINY, memory, trace=trace, costs=costs, gain=2.0, foretold=good)
    assert (both.layout, both.config.prefetch) == (
        "packed",
        "lookahead",
    ) and "foretells 70%" in str(both)
    there = advise(packed, memory, trace=trace, costs=costs, foretold=good)
    assert (
        there.config.prefetch == "lookahead"
        and there.token_s < there.settings[there.config.slots, there.config.policy].token_s.mean()
    )
    assert advise(packed, memory, trace=trace, costs=costs, foretold=bad).config.prefetch == "none"
    assert (
        advise(packed, float("inf"), trace=trace, costs=costs, foretold=good).config.prefetch
        == "none"
    ), "nothing is left to hide"
    for a in (plain, both, there):
        assert (a.config.slots, a.config.policy) == advice.pick(a.settings), (
            "what is read ahead does not change who is held"
        )
    assert plain.token_s > there.token_s > both.token_s
    counted = advise(packed, memory, trace=trace, costs=costs)
    assert "a look ahead foretells" in str(counted)

    def refused(path, slots):
        raise ValueError("its router cannot be asked ahead")

    monkeypatch.setattr(advice, "look_ahead", refused)
    a = advise(packed, memory, trace=trace, costs=costs)
    assert a.config.prefetch == "none" and "cannot be asked ahead" in str(a)


def test_what_a_look_ahead_foretells_is_counted():
    used, wasted, ask_s = advice.look_ahead(TINY, 64)
    assert 0.5 < used < 0.9 and 0 < wasted < 0.5 and 1e-5 < ask_s < 1


def test_what_cannot_run_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="expected at least .* GB of memory"):
        advise(TINY, memory=50e6, costs=READS, gain=1.0)
    with pytest.raises(ValueError, match="expected slots from 8"):
        advise(TINY, memory=400e6, costs=READS, slots=[4], gain=1.0)


def test_costs_and_the_gain_of_one_piece_are_measured_where_they_are_not_given():
    a = advise(TINY, memory=400e6, slots=[16, 64], policies=("lru",))
    assert a.token_s > 0 and np.isfinite(a.token_s) and len(a.settings) == 2

"""The decision alone: the best setting where that is known, and what cannot run is refused."""

from dataclasses import replace

import numpy as np
import pytest

from moelab.lab.experiments.page_cache import machine_and_model
from moelab.lab.records import read
from moelab.repack import Gain
from moelab.replay import advice, locality
from moelab.replay.costs import Costs

PLAN, _ = machine_and_model(read("cpu_costs_35b"))  # 4 layers of 256 experts
PLAN = replace(PLAN, other_nbytes=190_000_000)
READS = Costs(0.0, 0.0, 1e-10, 1e-9)
NO_GAIN = Gain(9, np.array([[1e9, 1e9]]))
FLAT = locality.Locality((0.3,) * 4, (0.3,) * 4, (1.5,) * 4)
TRACE = locality.synthesize(FLAT, 200, 4, 256, 8)


def settings(memory, costs, slots):
    return advice.replay_settings(PLAN, memory, TRACE, costs, [(n, "lru") for n in slots], 100)


def test_among_equals_it_takes_the_setting_that_moves_least_or_has_the_fewest_slots():
    equal = settings(1.5e9, replace(READS, fixed_s=10.0), [8, 60, 150])
    assert advice.pick(equal) == (150, "lru", False)
    assert advice.pick(equal, fewest_slots=True) == (8, "lru", False)


def test_it_does_not_take_the_slow_middle():
    s = settings(1.6e9, READS, [8, 80, 160])
    ms = {n: r.mean_s for (n, *_), r in s.items()}
    assert ms[80] > max(ms[8], ms[160])  # the page cache holds what the slots hold
    assert advice.pick(s)[0] == min(ms, key=ms.get) != 80


def test_advice_says_what_and_why():
    a = advice.advise(PLAN, 1.6e9, TRACE, READS, packed_gain=NO_GAIN)
    c = a.config
    assert (c.slots, c.policy, a.direct) == advice.pick(a.settings, True)
    assert a.token_s == a.settings[c.slots, c.policy, False].mean_s
    text = str(a)
    assert " <" in text and f"slots={c.slots}" in text and "1.60 GB" in text
    assert "in one piece" in text and "resident" not in text
    roomy = advice.advise(PLAN, float("inf"), TRACE, replace(READS, fixed_s=1e-3))
    assert "mode='resident'" in str(roomy) and "without a memory limit" in str(roomy)
    assert roomy.layout == "packed" and roomy.config.slots <= 256
    gains = (NO_GAIN, "as it is"), (Gain(9, np.array([[1e9, 2e9]])), "packed"), (None, "packed")
    for gain, layout in gains:
        assert advice.advise(PLAN, 4e8, TRACE, READS, packed_gain=gain).layout == layout
    for memory, slots, said in (50e6, None, "slots from 8 .* to 0"), (1.6e9, [4], "slots from 8"):
        with pytest.raises(ValueError, match=f"expected {said}"):
            advice.advise(PLAN, memory, TRACE, READS, slots=slots)


def test_it_reads_past_the_page_cache_where_that_is_faster():
    for direct_s, memory, direct in ((0.9e-9, 1e9, True), (5e-9, 1e9, False)):
        costs = replace(READS, direct_s_per_byte=direct_s)
        a = advice.advise(PLAN, memory, TRACE, costs, policy="lru")
        assert a.direct is direct and ("reads past the page cache" in str(a)) is direct
        assert {s.direct for s in a.settings} == {False, True}
        assert not direct or a.config.slots == PLAN.fits(memory), "as many as fit, as plan says"
    assert not advice.advise(PLAN, float("inf"), TRACE, costs, policy="lru").direct
    never = advice.advise(PLAN, 1e9, TRACE, READS, policy="lru")
    assert not any(s.direct for s in never.settings)

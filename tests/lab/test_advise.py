"""``advise`` for a model on this machine: what it measures, and the decision on top of it."""

from unittest.mock import Mock

import numpy as np

import moelab
from moelab.lab.experiments import advise as lab_advise
from moelab.lab.experiments.advise import advise
from moelab.lab.models import planned, recorded, settings_of
from moelab.repack import Gain, repack
from moelab.replay import locality
from moelab.replay.costs import Costs

TINY = moelab.DATA / "models" / "tiny-moe"
PLAN = planned(TINY)
MEMORY = PLAN.other_nbytes + PLAN.top_k * PLAN.facts.slot_nbytes + 4e6  # hardly any page cache
TRACE = locality.synthesize(locality.Locality((0.3,) * 4, (0.3,) * 4, (1.5,) * 4), 120, 8, 64, 8)
COSTS = Costs(1e-2, 5e-5, 1e-9, 4e-9)


def test_a_repack_is_advised_where_it_is_worth_it(tmp_path, monkeypatch):
    packed = repack(TINY, tmp_path / "packed", progress=False)
    for path, gain, expected in (
        (TINY, Gain(9, np.array([[1e9, 1e9]])), "as it is"),
        (TINY, Gain(9, np.array([[1e9, 2e9]])), "packed"),
        (packed, None, "packed"),
    ):
        monkeypatch.setattr(lab_advise, "cold_gain", Mock(return_value=gain))
        assert advise(path, MEMORY, TRACE, COSTS).layout == expected


def test_what_packed_experts_gain_is_measured():
    a = advise(TINY, 400e6, TRACE, COSTS)
    assert 0 < a.token_s <= 1.02 * min(r.mean_s for r in a.settings.values())
    assert "in its 9 pieces " in str(a) and "`python -m moelab repack MODEL OUT`" in str(a)


def test_as_many_slots_fit_as_plan_takes():
    config = moelab.StreamConfig(lazy_logits=True)
    slots = moelab.plan(TINY, config, memory_nbytes=int(200e6)).slots
    found = advise(TINY, 200e6, TRACE, COSTS).settings
    assert recorded(settings_of(PLAN)).fits(200e6) == PLAN.fits(200e6) == slots
    assert max(s.slots for s in found) == planned(TINY, 200e6).slots == slots > PLAN.top_k

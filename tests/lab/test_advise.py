"""``advise`` for a model on this machine: what it measures, and the decision on top of it."""

from unittest.mock import Mock

import moelab
from moelab.lab.experiments import advise as lab_advise
from moelab.lab.experiments.advise import advise
from moelab.repack import repack
from moelab.replay import locality
from moelab.replay.advice import Lookahead
from moelab.replay.costs import Costs
from moelab.replay.sizes import ModelSizes

TINY = moelab.DATA / "models" / "tiny-moe"
SIZE = ModelSizes.of(TINY)
MEMORY = SIZE.other_nbytes + SIZE.K * SIZE.slot_nbytes + 4e6  # hardly any page cache
TRACE = locality.synthesize(locality.Locality((0.3,) * 4, (0.3,) * 4, (1.5,) * 4), 120, 8, 64, 8)
COSTS = Costs(1e-2, 5e-5, 1e-9, 4e-9)
GOOD = Lookahead(0.7, 0.1, 1e-3)


def test_prefetch_and_layout_are_advised_together(tmp_path, monkeypatch):
    packed = repack(TINY, tmp_path / "packed", progress=False)
    for path, memory, gain, *expected in (
        (TINY, MEMORY, 1.0, "as it is", "none"),
        (TINY, MEMORY, 2.0, "packed", "lookahead"),
        (packed, MEMORY, None, "packed", "lookahead"),
        (packed, float("inf"), None, "packed", "none"),  # nothing is left to hide
    ):
        monkeypatch.setattr(lab_advise, "measure_packed_gain", Mock(return_value=gain))
        monkeypatch.setattr(lab_advise, "measure_lookahead", Mock(return_value=GOOD))
        found = advise(path, memory, TRACE, COSTS)
        assert [found.layout, found.config.prefetch] == expected
    refuse = Mock(side_effect=ValueError("its router cannot be asked ahead"))
    monkeypatch.setattr(lab_advise, "measure_lookahead", refuse)
    a = advise(packed, MEMORY, TRACE, COSTS)
    assert a.config.prefetch == "none" and "cannot be asked ahead" in str(a)


def test_what_a_lookahead_predicts_is_counted():
    used, wasted, cost_s = lab_advise.measure_lookahead(TINY, 64)
    assert 0.5 < used < 0.9 and 0 < wasted < 0.5 and abs(cost_s) < 1


def test_what_packed_experts_gain_is_measured():
    a = advise(TINY, 400e6, TRACE, COSTS)
    assert 0 < a.token_s <= 1.02 * min(r.mean_s for r in a.settings.values())


def test_as_many_slots_fit_as_plan_takes():
    config = moelab.StreamConfig(lazy_logits=True)
    slots = moelab.plan(TINY, config, memory_nbytes=int(200e6)).slots
    found = advise(TINY, 200e6, TRACE, COSTS).settings
    assert max(s.slots for s in found) == ModelSizes.of(TINY, 200e6).fits(200e6) == slots > SIZE.K

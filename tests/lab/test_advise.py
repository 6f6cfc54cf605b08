"""``advise`` for a model on this machine: what it measures, and the decision on top of it."""

import pytest

import moelab
from moelab.lab.experiments import advise as lab_advise
from moelab.lab.experiments.advise import advise
from moelab.repack import repack
from moelab.replay import advice, locality
from moelab.replay.advice import Lookahead
from moelab.replay.costs import Costs
from moelab.replay.sizes import ModelSizes

TINY = moelab.DATA / "models" / "tiny-moe"
FLAT = locality.Locality((0.3,) * 4, (0.3,) * 4, (1.5,) * 4)


def test_prefetch_and_layout_are_advised_together(tmp_path, monkeypatch):
    packed = repack(TINY, tmp_path / "packed", progress=False)
    trace = locality.synthesize(FLAT, 120, 8, 64, 8)
    costs = Costs(1e-2, 5e-5, 1e-9, 4e-9)
    size = ModelSizes.of(TINY)
    memory = size.other_nbytes + size.K * size.slot_nbytes + 4e6  # hardly any page cache
    given = {"trace": trace, "costs": costs}
    free = advise(packed, float("inf"), lookahead=Lookahead(0.7, 0.1, 1e-3), **given)
    assert free.config.prefetch == "none", "nothing is left to hide"
    good = Lookahead(0.7, 0.1, 1e-3)
    plain = advise(TINY, memory, packed_gain=1.0, lookahead=good, **given)
    assert (plain.layout, plain.config.prefetch) == ("as it is", "none")
    both = advise(TINY, memory, packed_gain=2.0, lookahead=good, **given)
    assert (both.layout, both.config.prefetch) == ("packed", "lookahead")
    there = advise(packed, memory, lookahead=good, **given)
    assert (there.layout, there.config.prefetch) == ("packed", "lookahead")
    assert plain.token_s > there.token_s > both.token_s
    for a in (plain, both, there):
        assert (a.config.slots, a.config.policy, a.direct) == advice.pick(a.settings)
    counted = advise(packed, memory, **given)
    assert "a lookahead predicts" in str(counted)

    def refuse(path, slots):
        raise ValueError("its router cannot be asked ahead")

    monkeypatch.setattr(lab_advise, "measure_lookahead", refuse)
    a = advise(packed, memory, **given)
    assert a.config.prefetch == "none" and "cannot be asked ahead" in str(a)


def test_what_a_lookahead_predicts_is_counted():
    used, wasted, cost_s = lab_advise.measure_lookahead(TINY, 64)
    assert 0.5 < used < 0.9 and 0 < wasted < 0.5 and abs(cost_s) < 1


def test_what_cannot_run_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(lab_advise, "measure_costs", None)
    with pytest.raises(ValueError, match="expected at least .* of memory"):
        advise(TINY, memory=50e6)


def test_what_is_not_given_is_measured():
    a = advise(TINY, memory=400e6, slots=[16, 64], policies=("lru",))
    assert 0 < a.token_s <= 1.02 * min(r.mean_s for r in a.settings.values())
    assert {(s.slots, s.policy) for s in a.settings} == {(16, "lru"), (64, "lru")}
    assert f"slots={a.config.slots}" in str(a) and moelab.footprint(TINY, a.config)


@pytest.mark.parametrize("memory", (145e6, 150e6, 200e6))
def test_as_many_slots_fit_as_plan_takes(memory):
    config = moelab.StreamConfig(lazy_logits=True)
    planned = moelab.plan(TINY, config, memory_nbytes=int(memory))
    size = ModelSizes.of(TINY, memory)
    assert size.fits(memory) == planned.slots or planned.slots == size.K
    found = advise(TINY, memory, costs=Costs(5e-3, 1e-4, 1e-10, 1e-9), packed_gain=1.0).settings
    assert max(s.slots for s in found) == size.fits(memory)

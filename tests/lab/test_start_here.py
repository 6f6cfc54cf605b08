"""Notebook 00: the plan and the dial."""

import pytest

from moelab import StreamConfig, footprint
from moelab.lab.experiments import start_here


def test_a_plan_says_which_slots_fit(model_path):
    whole = footprint(model_path, StreamConfig(mode="resident"))
    plan = start_here.plan(model_path, allowed=0.9)
    assert whole.top_k <= min(plan.index) and max(plan.index) <= whole.num_experts
    assert plan.predicted_nbytes.is_monotonic_increasing
    most = plan[plan.fits].index.max()
    assert plan.predicted_nbytes[most] <= 0.9 * whole.total_nbytes < plan.predicted_nbytes.iloc[-1]
    assert plan.hit_rate[most] == most / whole.num_experts
    needed = whole.num_layers * whole.top_k * whole.expert_nbytes
    assert plan.read_nbytes_per_token[most] == pytest.approx(
        needed * (1 - most / whole.num_experts)
    )
    assert not start_here.plan(model_path, allowed=0.0).fits.any()


def test_dial(model_path):
    top_k = footprint(model_path).top_k
    look = start_here.dial(model_path, "def f", tokens=3)
    full = look(top_k=top_k, slots=top_k)
    assert "the first 4 of 4 tokens are" in full.layout.meta["finding"]
    assert "is lossy" in look(top_k=1, slots=top_k).layout.meta["finding"]

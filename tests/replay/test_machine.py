"""``Machine``: how long a model's token takes, from a machine's rates."""

from dataclasses import replace

import numpy as np
import pytest

from moelab.lab.experiments.page_cache import machine_and_model
from moelab.lab.records import read
from moelab.memory import CLIFF
from moelab.replay.machine import Machine, distinct, typical_trace
from moelab.replay.pagecache import replay

PLAN, _ = machine_and_model(read("cpu_costs_35b_full"))  # 40 layers of 256 experts, 19.5 GB
FACTS = PLAN.facts
MAC = Machine.mac(32e9, 6e9, 150e9)


def speed(machine, slots=64):
    found = replay(
        typical_trace(FACTS, 80),
        machine.memory_nbytes,
        slots,
        expert_nbytes=FACTS.expert_nbytes,
        costs=machine.costs(FACTS, PLAN.other_nbytes + slots * FACTS.slot_nbytes),
        other_nbytes=PLAN.other_nbytes,
        skip=40,
    )
    return found.tok_s


def test_a_faster_part_makes_a_faster_machine():
    for faster in (
        Machine.mac(32e9, 12e9, 150e9),
        Machine.mac(32e9, 6e9, 300e9),
        replace(MAC, layer_s=0.0),
        replace(MAC, wait_s=(0.0, 0.0)),
    ):
        assert speed(faster) > speed(MAC)


def test_slots_for_which_a_mac_swaps_are_a_cliff():
    small = Machine.mac(24e9, 6e9, 150e9)
    most = PLAN.fits(small.most.least)
    assert PLAN.top_k < most < PLAN.num_experts
    assert speed(small, most) > 0.9 * CLIFF * speed(small, most + 1)


@pytest.mark.parametrize("tokens", (1, 4, 100))
def test_so_many_different_experts_as_the_trace_has(tokens):
    many = replace(FACTS, experts=dict.fromkeys(range(100), 256))
    trace = typical_trace(many, tokens)
    drawn = np.mean([len(np.unique(layer)) for layer in trace.experts.swapaxes(0, 1)])
    assert distinct(FACTS, tokens) == pytest.approx(drawn, rel=0.03)


def test_a_prompt_takes_at_least_its_reads_and_at_most_a_decoded_tokens_work_as_well():
    least, most = MAC.prompt_s(PLAN, 5000, 32)
    again = [distinct(FACTS, n) - 32 for n in (2048, 5000 - 2 * 2048)]  # of parts after the first
    nbytes = 40 * (distinct(FACTS, 2048) + sum(again)) * FACTS.expert_nbytes
    work = 5000 * FACTS.active_nbytes / MAC.weights_bytes_per_s
    assert (least, most) == pytest.approx((nbytes / MAC.disk_bytes_per_s, least + work))
    known = replace(MAC, prompt_share=0.5)
    assert known.prompt_s(PLAN, 50_000, 256)[0] == pytest.approx(0.5 * 10 * work)
    assert MAC.prompt_s(PLAN, 1, 32)[0] < least


def test_a_measured_machine_gives_back_what_was_measured():
    plan, costs = machine_and_model(read("cpu_costs_35b"))
    machine = Machine.measured(costs, plan.facts, 25e9, 5e9)
    again = machine.costs(plan.facts)
    assert machine.memory_nbytes == pytest.approx(20e9)
    assert again.fixed_s == pytest.approx(costs.fixed_s)
    assert again.expert_s == pytest.approx(costs.expert_s)
    assert again.direct_s_per_byte == pytest.approx(costs.direct_s_per_byte)

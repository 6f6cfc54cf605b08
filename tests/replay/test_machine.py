"""``Machine``: how long a model's token takes, from a machine's rates."""

from dataclasses import replace

import numpy as np
import pytest

from moelab.lab.experiments.costs import costs_of
from moelab.lab.records import read
from moelab.memory import CLIFF
from moelab.replay.machine import Machine, distinct, typical_trace
from moelab.replay.pagecache import replay
from moelab.replay.sizes import ModelSizes

SIZES = ModelSizes(19.5e9, 2e9, 1_769_472, 70_778_880, 40, 256, 8, token_nbytes=1.1e9, layers=40)
MAC = Machine.mac(32e9, 6e9, 150e9)


def speed(machine, slots=64):
    found = replay(
        typical_trace(SIZES, 80),
        machine.memory_nbytes,
        slots,
        expert_nbytes=SIZES.expert_nbytes,
        costs=machine.costs(SIZES, SIZES.other_nbytes + slots * SIZES.slot_nbytes),
        other_nbytes=int(SIZES.other_nbytes),
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
    most = SIZES.fits(small.most.least)
    assert SIZES.K < most < SIZES.E
    assert speed(small, most) > 0.9 * CLIFF * speed(small, most + 1)


@pytest.mark.parametrize("tokens", (1, 4, 100))
def test_so_many_different_experts_as_the_trace_has(tokens):
    trace = typical_trace(replace(SIZES, L=100), tokens)
    drawn = np.mean([len(np.unique(layer)) for layer in trace.experts.swapaxes(0, 1)])
    assert distinct(SIZES, tokens) == pytest.approx(drawn, rel=0.03)


def test_a_prompt_takes_at_least_its_reads_and_at_most_a_decoded_tokens_work_as_well():
    least, most = MAC.prompt_s(SIZES, 5000, 32)
    again = [distinct(SIZES, n) - 32 for n in (2048, 5000 - 2 * 2048)]  # of parts after the first
    nbytes = SIZES.L * (distinct(SIZES, 2048) + sum(again)) * SIZES.expert_nbytes
    work = 5000 * SIZES.active_nbytes / MAC.weights_bytes_per_s
    assert (least, most) == pytest.approx((nbytes / MAC.disk_bytes_per_s, least + work))
    known = replace(MAC, prompt_share=0.5)
    assert known.prompt_s(SIZES, 50_000, 256)[0] == pytest.approx(0.5 * 10 * work)
    assert MAC.prompt_s(SIZES, 1, 32)[0] < least


def test_a_measured_machine_gives_back_what_was_measured():
    samples = read("cpu_costs_35b")
    costs, given = costs_of(samples), samples.attrs["settings"]
    sizes = replace(SIZES, L=given["L"], layers=4, token_nbytes=9e7)
    machine = Machine.measured(costs, sizes, 25e9, 5e9)
    again = machine.costs(sizes)
    assert machine.memory_nbytes == pytest.approx(20e9)
    assert again.fixed_s == pytest.approx(costs.fixed_s)
    assert again.expert_s == pytest.approx(costs.expert_s)
    assert again.direct_s_per_byte == pytest.approx(costs.direct_s_per_byte)

"""How a token's time follows from a machine's rates; the best setting; reads of several ranks."""

from dataclasses import replace

import numpy as np
import pytest

from moelab import DATA, Trace
from moelab.lab.experiments.page_cache import machine_and_model
from moelab.lab.records import read
from moelab.memory import CLIFF
from moelab.replay import advice, locality, ranks
from moelab.replay.costs import Costs
from moelab.replay.eviction import held
from moelab.replay.machine import Machine, distinct, typical_trace
from moelab.replay.pagecache import replay
from moelab.streaming.ranks import by_number

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
    again = [distinct(FACTS, n) - 32 for n in (2048, 5000 - 2 * 2048)]  # for later parts
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


PLAN_4, _ = machine_and_model(read("cpu_costs_35b"))  # 4 layers of 256 experts
PLAN_4 = replace(PLAN_4, other_nbytes=190_000_000)
READS = Costs(0.0, 0.0, 1e-10, 1e-9)
FLAT = locality.Locality((0.3,) * 4, (0.3,) * 4, (1.5,) * 4)
TRACE = locality.synthesize(FLAT, 200, 4, 256, 8)


def settings(memory, costs, slots):
    return advice.replay_settings(PLAN_4, memory, TRACE, costs, [(n, "lru") for n in slots], 100)


def test_among_equals_it_takes_the_setting_that_moves_least_or_has_the_fewest_slots():
    equal = settings(1.5e9, replace(READS, fixed_s=10.0), [8, 60, 150])
    assert advice.pick(equal) == (150, "lru", False)
    assert advice.pick(equal, fewest_slots=True) == (8, "lru", False)


def test_it_does_not_take_the_slow_middle():
    s = settings(1.6e9, READS, [8, 80, 160])
    ms = {n: r.mean_s for (n, *_), r in s.items()}
    assert ms[80] > max(ms[8], ms[160])  # the page cache holds the slots' experts, too
    assert advice.pick(s)[0] == min(ms, key=ms.get) != 80


def test_advice_says_what_and_why():
    a = advice.advise(PLAN_4, 1.6e9, TRACE, READS)
    c = a.config
    assert (c.slots, c.policy, a.direct) == advice.pick(a.settings, True)
    assert a.token_s == a.settings[c.slots, c.policy, False].mean_s
    text = str(a)
    assert " <" in text and f"slots={c.slots}" in text and "1.60 GB" in text
    assert "resident" not in text
    roomy = advice.advise(PLAN_4, float("inf"), TRACE, replace(READS, fixed_s=1e-3))
    assert "mode='resident'" in str(roomy) and "without a memory limit" in str(roomy)
    assert roomy.config.slots <= 256
    for memory, slots, said in (50e6, None, "slots from 8 .* to 0"), (1.6e9, [4], "slots from 8"):
        with pytest.raises(ValueError, match=f"expected {said}"):
            advice.advise(PLAN_4, memory, TRACE, READS, slots=slots)


def test_it_reads_past_the_page_cache_where_that_is_faster():
    for direct_s, memory, direct in ((0.9e-9, 1e9, True), (5e-9, 1e9, False)):
        costs = replace(READS, direct_s_per_byte=direct_s)
        a = advice.advise(PLAN_4, memory, TRACE, costs, policy="lru")
        assert a.direct is direct and ("reads past the page cache" in str(a)) is direct
        assert {s.direct for s in a.settings} == {False, True}
        assert not direct or a.config.slots == PLAN_4.fits(memory), "as many as fit, as plan says"
    assert not advice.advise(PLAN_4, float("inf"), TRACE, costs, policy="lru").direct
    never = advice.advise(PLAN_4, 1e9, TRACE, READS, policy="lru")
    assert not any(s.direct for s in never.settings)


CODE = Trace.load(DATA / "traces" / "code.npz").decode[:120]
L, E = CODE.experts.shape[1], CODE.num_experts


def test_one_rank_reads_what_the_replay_of_a_policy_misses():
    found = ranks.reads(CODE.experts, by_number(L, E, 1), 16, 1)
    np.testing.assert_array_equal(found[:, :, 0], (~held(CODE.experts, E, 16)).sum(2))


@pytest.mark.parametrize("n", [2, 4])
def test_each_expert_is_read_by_its_rank(n):
    """The owner of an expert reads the expert once if every expert has a slot."""
    owners = by_number(L, E, n)
    found = ranks.reads(CODE.experts, owners, E, n).sum(0)
    for layer in range(L):
        used = np.unique(CODE.experts[:, layer])
        counts = np.bincount(owners[layer, used], minlength=n)
        np.testing.assert_array_equal(found[layer], counts)


def test_shared_experts_are_not_read_and_take_slots():
    owners = by_number(L, E, 2)
    hot = [[e for e in range(E) if e not in (0, 1)]] * L
    experts = CODE.experts % 4
    needed = np.sort(experts, -1)
    needed = np.where(np.diff(needed, prepend=99) == 0, 2, needed)  # expert 2 is on all ranks
    found = ranks.reads(needed, owners, E, 2, hot)
    assert found.sum(0).max() <= 1 and found.sum() > 0


def test_any_rank_may_read():
    """Ranks' reads of a layer differ by one at most, and no held expert is read again."""
    found = ranks.reads(CODE.experts, None, E, 2)
    assert (np.ptp(found, axis=2) <= 1).all()
    distinct = sum(len(np.unique(CODE.experts[:, layer])) for layer in range(L))
    assert found.sum() == distinct
    waited, mean = ranks.waited(found)
    assert mean <= waited <= ranks.waited(ranks.reads(CODE.experts, by_number(L, E, 2), E, 2))[0]


def test_a_token_on_machines():
    """By hand: 10 reads of 1 MB at 100 MB/s, and a message (1 ms, 3 rows) in each of 2 layers."""
    machines = ranks.Machines(2, 100e6, 1e6, 1e-3, 0.05)
    parts = machines.parts(10, 1_000_000, 2, 3, 1000)
    assert parts == pytest.approx({"reads": 0.1, "arithmetic": 0.05, "exchange": 2 * 0.004})
    assert ranks.Machines(1, 1, 1, 1, 0).parts(0, 0, 1, 3, 1000)["exchange"] == 0

"""Reads of ranks that divide the experts, replayed."""

import numpy as np
import pytest

from moelab import DATA, Trace
from moelab.replay import ranks
from moelab.replay.eviction import held
from moelab.streaming.ranks import by_number

TRACE = Trace.load(DATA / "traces" / "code.npz").decode[:120]
L, E = TRACE.experts.shape[1], TRACE.num_experts


def test_one_rank_reads_what_the_replay_of_a_policy_misses():
    found = ranks.reads(TRACE.experts, by_number(L, E, 1), 16, 1)
    np.testing.assert_array_equal(found[:, :, 0], (~held(TRACE.experts, E, 16)).sum(2))


@pytest.mark.parametrize("n", [2, 4])
def test_each_expert_is_read_by_its_rank(n):
    """With a slot for every expert each is read once, by its owner."""
    owners = by_number(L, E, n)
    found = ranks.reads(TRACE.experts, owners, E, n).sum(0)
    for layer in range(L):
        used = np.unique(TRACE.experts[:, layer])
        counts = np.bincount(owners[layer, used], minlength=n)
        np.testing.assert_array_equal(found[layer], counts)


def test_shared_experts_are_not_read_and_take_slots():
    owners = by_number(L, E, 2)
    hot = [[e for e in range(E) if e not in (0, 1)]] * L
    experts = TRACE.experts % 4
    needed = np.sort(experts, -1)
    needed = np.where(np.diff(needed, prepend=99) == 0, 2, needed)  # 2 is on all ranks
    found = ranks.reads(needed, owners, E, 2, hot)
    assert found.sum(0).max() <= 1 and found.sum() > 0


def test_any_rank_may_read():
    """Reads of one layer differ by one at most, and an expert that is held is not read again."""
    found = ranks.reads(TRACE.experts, None, E, 2)
    assert (np.ptp(found, axis=2) <= 1).all()
    distinct = sum(len(np.unique(TRACE.experts[:, layer])) for layer in range(L))
    assert found.sum() == distinct
    waited, mean = ranks.waited(found)
    assert mean <= waited <= ranks.waited(ranks.reads(TRACE.experts, by_number(L, E, 2), E, 2))[0]


def test_a_token_on_machines():
    """By hand: 10 reads of 1 MB at 100 MB/s; two layers of one message of 1 ms and 3 rows."""
    machines = ranks.Machines(2, 100e6, 1e6, 1e-3, 0.05)
    parts = machines.parts(10, 1_000_000, 2, 3, 1000)
    assert parts == pytest.approx({"reads": 0.1, "arithmetic": 0.05, "exchange": 2 * 0.004})
    assert ranks.Machines(1, 1, 1, 1, 0).exchange_s(3, 1000) == 0

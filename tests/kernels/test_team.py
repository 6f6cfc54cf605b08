"""The team: each piece is computed once, whichever threads take part and whatever else runs."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import numpy as np
import pytest
from common import needs_kernels
from hypothesis import given

from moelab.kernels import code, team
from moelab.kernels.code import I64, Code

pytestmark = needs_kernels


class Count(Code):
    """Adds one to the count of each piece, after some work."""

    def write(self, counts):
        end = [I64(0)]
        with self.loop(0, 20_000, values=end) as i:
            end[0] = self.add(end[0], i)
        more = self.b.add(I64(1), self.b.and_(end[0], I64(0)))
        count = self.b.gep(self.pointer(counts, I64), [self.piece])
        self.b.atomic_rmw("add", count, more, "monotonic")


@pytest.fixture(scope="module")
def count():
    writer = Count(8)
    return writer.link(writer.compile())


@pytest.mark.parametrize("pieces", (1, 2, 3, 64, 1000))
def test_each_piece_is_computed_once(count, pieces):
    counts = np.zeros(pieces, np.int64)
    for n in range(1, 50):
        team.run(count, counts, pieces=pieces)
        assert (counts == n).all()


def test_callers_in_many_threads_and_threads_that_sleep(count):
    def many(_):
        counts = np.zeros(7, np.int64)
        for _ in range(200):
            team.run(count, counts, pieces=7)
        return counts

    with ThreadPoolExecutor(6) as pool:
        assert all((counts == 200).all() for counts in pool.map(many, range(6)))
    counts = np.zeros(2, np.int64)
    for _ in range(5):
        time.sleep(20 * team.SPIN_S)
        team.run(count, counts, pieces=2)
    assert (counts == 5).all()
    names = [thread.name for thread in threading.enumerate()]
    made = team._team()  # one team, with the threads of its first use; None on one core
    started = sum(name.startswith("moelab-team") for name in names)
    assert started == (len(made._threads) if made else 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_computes_too(count):
    counts = np.zeros(8, np.int64)
    team.run(count, counts, pieces=8)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # ends a child that waits for ever
        counts[:] = 0
        team.run(count, counts, pieces=8)
        os._exit(0 if (counts == 1).all() else 1)
    assert os.waitpid(pid, 0)[1] == 0


@given(st.lists(st.lists(st.integers(0, 90_000), min_size=1, max_size=2), max_size=12))
def test_memory_is_given_to_one_array_at_a_time(shapes):
    memory, addresses = code.Memory(), []
    for _ in range(2):
        memory.rewind()
        arrays = [memory.empty(*(n % 300 if s[1:] else n for n in s)) for s in shapes]
        for i, a in enumerate(arrays):
            a[...] = i
            assert a.ctypes.data % 64 == 0 or a.size == 0
        assert all((a == i).all() for i, a in enumerate(arrays))
        addresses.append([a.ctypes.data for a in arrays])
    assert addresses[0] == addresses[1]

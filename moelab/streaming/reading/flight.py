"""Reads past the page cache that need no thread (Linux's ``io_submit``; ``io_uring`` is no faster).

Blocks of the disk land in the slots. Where an expert's bytes cannot stay as they landed
(``Record``), they are moved when somebody asks whether they have arrived.
"""

import ctypes
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ...kernels.code import I64
from ...system import HERE, Linux
from .file import check_unchanged
from .native import FD, GOT, NBYTES, OFFSET, ROOM, TableCode, address_of, built
from .ranges import Ranges, read_ranges

# Linux's numbers of io_setup, io_destroy, io_submit and io_getevents.
CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
DEPTH = 4096  # reads in flight, at most
PENDING = -2  # ``GOT`` of a read in flight
# A thread that waits for a read polls for this many seconds before it sleeps: a core that slept
# takes 0.05 ms and more to begin again.
SPIN_S = 3e-3


class Queue:
    """The system's queue of reads in flight, for one thread; ``OSError`` where there is none."""

    def __init__(self):
        numbers = CALLS.get(platform.machine()) if isinstance(HERE, Linux) else None
        code = built(_Send, "syscall"), built(_Land, "syscall", "memmove")
        if numbers is None or None in code:
            raise OSError("no reads without a thread on this system")
        self._send, self._land = code
        setup, self._destroy, self._submit, self._getevents = numbers
        self._system, context = ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_ulong()
        if self._system(setup, DEPTH, ctypes.byref(context)) < 0:
            raise OSError(ctypes.get_errno(), "io_setup")
        self._context = context.value
        self._events = np.zeros((DEPTH, 4), np.int64)
        self._process, self._lock = os.getpid(), threading.Lock()
        self._flying = []  # for each flight, what its reads need until they end
        self.counted_s = 0.0  # the time up to which the seconds of reads have been counted
        _queues.add(self)

    def begin(self, ranges: Ranges, table: np.ndarray) -> bool:
        """Begin to read a table of ``Ranges.direct_table``; False if the queue has no room."""
        self._flying = [flying for flying in self._flying if pending(flying[0])]
        n = len(table)
        if n + sum(len(flying[0]) for flying in self._flying) > DEPTH:
            return False
        before = table[:, OFFSET] % ranges.align
        rows, at = np.empty((n, 3), np.int64), np.arange(n)
        rows[:, 0] = address_of(table) + at * table.strides[0]
        rows[:, 1], rows[:, 2] = table[:, ROOM] + before, before + table[:, NBYTES]
        iocbs = np.zeros((n, 8), np.int64)  # as in linux/aio_abi.h
        iocbs[:, 0] = address_of(rows) + at * rows.strides[0]
        iocbs[:, 2], iocbs[:, 3] = table[:, FD] << 32, table[:, ROOM]
        iocbs[:, 4] = -(-rows[:, 2] // ranges.align) * ranges.align
        iocbs[:, 5] = table[:, OFFSET] - before
        pointers, table[:, GOT] = address_of(iocbs) + at * iocbs.strides[0], -1
        self._flying.append((table, rows, iocbs, ranges))
        self._send(self._submit, self._context, n, address_of(pointers), address_of(rows))
        return True

    def reap(self, wait: bool = False) -> None:
        """Note which reads have ended; if ``wait``, first wait until at least one has ended."""
        events = address_of(self._events)
        with self._lock:
            self._land(self._getevents, self._context, int(wait), events, DEPTH)

    def wait(self) -> None:
        """Wait until all reads in flight have ended."""
        # In a forked process no read ends: the queue belongs to the parent.
        for table, *_ in self._flying if os.getpid() == self._process else ():
            while pending(table):
                self.reap()

    def settle(self) -> None:
        """Wait until nothing is in flight, and let go of what the reads needed."""
        self.wait()
        self._flying = []

    def __del__(self):
        if hasattr(self, "_flying"):
            self.settle()
            self._system(self._destroy, ctypes.c_ulong(self._context))


# Before Linux 6.5, reads that end after a fork could write to a page of the other process.
_queues = weakref.WeakSet()
os.register_at_fork(before=lambda: [queue.wait() for queue in [*_queues]])


def pending(table: np.ndarray) -> bool:
    """Whether any read of a table is in flight."""
    return PENDING in table[:, GOT].tolist()


@dataclass(eq=False)
class Flight:
    """Ranges in flight. A caller waits for them as for ``Threads``."""

    queue: Queue
    ranges: Ranges
    table: np.ndarray  # rows of the table that ``Queue.begin`` was given
    # Called with the number, bytes and seconds of reads that ended (0 s if nobody waited).
    count: Callable[[int, int, float], None]
    begin: float = field(default_factory=time.perf_counter)

    def cancel(self) -> bool:
        """Return False: reads in flight cannot be cancelled."""
        return False

    def done(self) -> bool:
        if pending(self.table):
            self.queue.reap()
        return not pending(self.table)

    def result(self) -> float:
        """Wait; read incomplete ranges again; return an upper bound of the reads' seconds."""
        begin, waited = time.perf_counter(), False
        while pending(self.table):
            self.queue.reap(wait=time.perf_counter() - begin > SPIN_S)
            waited = True
        nbytes = self.table[:, NBYTES].tolist()
        if self.table[:, GOT].tolist() != nbytes:
            read_ranges(self.ranges.left(self.table))
            waited = True
        now, counted_s = time.perf_counter(), self.queue.counted_s
        check_unchanged(self.ranges.files.values())
        # Time in which several flights overlap is counted once.
        took_s = now - max(self.begin, counted_s) if waited else 0.0
        self.count(len(nbytes), sum(nbytes), took_s)
        if waited:
            self.queue.counted_s = now
        return now - self.begin


class _Rows(TableCode):
    """Code that loads the rows that ``Queue.begin`` makes."""

    def row(self, rows, i):
        """Load row i: the table's row, the place of its first byte, and how many bytes it needs."""
        row, place, needed = self.fields(rows, self.mul(i, 3), 0, 1, 2)
        return self.pointer(row, I64), place, needed


class _Send(_Rows):
    """Begins reads and marks them as pending: one call, so that no interrupt comes between."""

    def write(self, io_submit, context, n, iocbs, rows):
        begun = self.b.call(self.libc("syscall", *[I64] * 4), [io_submit, context, n, iocbs])
        rows = self.pointer(rows, I64)
        with self.loop(0, begun) as i:
            self.store(I64(PENDING), self.row(rows, i)[0], I64(GOT))


class _Land(_Rows):
    """Takes the events of ended reads, and moves the bytes that were read: also one call."""

    def write(self, io_getevents, context, least, memory, most):
        events, syscall = self.pointer(memory, I64), self.libc("syscall", *[I64] * 6)
        n = self.b.call(syscall, [io_getevents, context, least, most, memory, I64(0)])
        with self.loop(0, n) as i:
            data, got = self.fields(events, self.mul(i, 4), 0, 2)
            row, place, needed = self.row(self.pointer(data, I64), I64(0))
            # The read gives fewer bytes than whole blocks if the file ends in the last block.
            self.land(row, place, self.b.icmp_signed(">=", got, needed))

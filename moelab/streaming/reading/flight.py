"""Asynchronous reads past the page cache: the thread that begins them goes on meanwhile.

Linux makes them without a thread (``io_submit``). The bytes come into a buffer that stays in the
processor's cache, and they are copied to their slots when somebody asks whether they have arrived.
"""

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ...kernels.code import I64
from .file import check_unchanged
from .native import ALIGNED, FD, GOT, NBYTES, OFFSET, TableCode, address_of, built, huge_pages
from .ranges import Ranges, read_ranges

# Linux's numbers of io_setup, io_destroy, io_submit and io_getevents.
CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
DEPTH = 512  # reads in flight, at most
# The buffer's address space; only used pages take memory. It holds 36 experts of 1.77 MB: a verify
# pass of 4 positions misses 20 and more, and what does not fit is read by threads.
BUFFER_NBYTES = 64 * 1024 * 1024
PENDING = -2  # what ``GOT`` says of a read in flight
# Seconds. A thread that waits for a read polls for so long before it sleeps: a core that slept
# takes 0.05 ms and more to begin again.
SPIN_S = 3e-3


class Queue:
    """The system's queue of reads in flight, for one thread; ``OSError`` where there is none."""

    def __init__(self):
        numbers = CALLS.get(platform.machine())
        self._send, self._land = built(_Send, "syscall"), built(_Land, "syscall", "memcpy")
        if sys.platform != "linux" or numbers is None or self._send is None or self._land is None:
            raise OSError("no reads without a thread on this system")
        setup, self._destroy, self._submit, self._getevents = numbers
        self._system, context = ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_ulong()
        if self._system(setup, DEPTH, ctypes.byref(context)) < 0:
            raise OSError(ctypes.get_errno(), "io_setup")
        self._context = context.value
        self._buffer, self._events = huge_pages(BUFFER_NBYTES), np.zeros((DEPTH, 4), np.int64)
        self._process = os.getpid()
        self._flying = []  # keeps for each flight what its reads need until they have ended

    def begin(self, ranges: Ranges, table: np.ndarray) -> bool:
        """Begin to read a table of ``Ranges.direct_table``; False if the queue has no room."""
        self._flying = [flying for flying in self._flying if pending(flying[0])]
        before = table[:, OFFSET] % ALIGNED
        whole = -(-(before + table[:, NBYTES]) // ALIGNED) * ALIGNED
        ends = np.cumsum(whole)
        first, n = self._room(int(ends[-1])), len(table)
        if first is None or n + sum(len(flying[0]) for flying in self._flying) > DEPTH:
            return False
        places = address_of(self._buffer) + first + ends - whole
        rows, at = np.zeros((n, 3), np.int64), np.arange(n)
        rows[:, 0] = address_of(table) + at * table.strides[0]
        rows[:, 1], rows[:, 2] = places + before, before + table[:, NBYTES]
        iocbs = np.zeros((n, 8), np.int64)  # as in linux/aio_abi.h
        iocbs[:, 0] = address_of(rows) + at * rows.strides[0]
        iocbs[:, 2], iocbs[:, 3], iocbs[:, 4] = table[:, FD] << 32, places, whole
        iocbs[:, 5] = table[:, OFFSET] - before
        pointers, table[:, GOT] = address_of(iocbs) + at * iocbs.strides[0], -1
        self._flying.append((table, rows, iocbs, ranges, first, first + int(ends[-1])))
        self._send(self._submit, self._context, n, address_of(pointers), address_of(rows))
        return True

    def _room(self, nbytes):
        """The first place in the buffer where so many bytes are free; None if there is none."""
        at = 0
        for first, end in sorted((first, end) for *_, first, end in self._flying):
            if first - at >= nbytes:
                break
            at = end
        return at if at + nbytes <= BUFFER_NBYTES else None

    def reap(self, wait: bool = False) -> None:
        """Copy the bytes of ended reads to their slots; ``wait``: until at least one has ended."""
        events = address_of(self._events)
        self._land(self._getevents, self._context, int(wait), events, DEPTH)

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        # In a fork of the process no read ends: the queue is its parent's.
        for table, *_ in self._flying if os.getpid() == self._process else ():
            while pending(table):
                self.reap(wait=True)
        self._flying = []

    def __del__(self):
        if hasattr(self, "_flying"):
            self.settle()
            self._system(self._destroy, ctypes.c_ulong(self._context))


def pending(table: np.ndarray) -> bool:
    """Whether any read of a table is in flight."""
    return PENDING in table[:, GOT].tolist()


@dataclass(eq=False)
class Flight:
    """Ranges in flight, which can be waited for as a ``Future`` can."""

    queue: Queue
    ranges: Ranges
    table: np.ndarray  # that ``Queue.begin`` was given
    # Gets number, bytes and seconds when they have ended; 0 seconds if nobody waited for them.
    count: Callable[[int, int, float], None]
    begin: float = field(default_factory=time.perf_counter)

    def divided(self, parts: int) -> "list[Flight]":
        """Flights of equally many ranges each."""
        n = len(self.table) // parts
        rows = [slice(i, i + n) for i in range(0, len(self.table), n)]
        return [Flight(self.queue, self.ranges[r], self.table[r], self.count) for r in rows]

    def done(self) -> bool:
        """Whether the reads have ended."""
        if pending(self.table):
            self.queue.reap()
        return not pending(self.table)

    def result(self) -> float:
        """Wait for the reads, and read again what did not come whole.

        Returns the most seconds that they can have taken.
        """
        begin, waited = time.perf_counter(), False
        while pending(self.table):
            self.queue.reap(wait=time.perf_counter() - begin > SPIN_S)
            waited = True
        if (self.table[:, GOT] != self.table[:, NBYTES]).any():
            read_ranges(self.ranges.left(self.table))
            waited = True
        took_s = time.perf_counter() - self.begin
        check_unchanged(self.ranges.files.values())
        self.count(len(self.table), self.ranges.nbytes, took_s if waited else 0.0)
        return took_s


class _Rows(TableCode):
    """Code that knows ``Queue``'s rows."""

    def row(self, rows, i):
        """The row of the table, the place of its bytes in the buffer, and the bytes it needs."""
        row, place, needed = self.fields(rows, self.mul(i, 3), 0, 1, 2)
        return self.pointer(row, I64), place, needed


class _Send(_Rows):
    """Writes ``run(number of io_submit, context, n, addresses of iocbs, rows)``.

    It begins reads and marks them as pending in one call, so that no interrupt comes between.
    """

    def write(self):
        *arguments, rows = self.arguments
        begun = self.b.call(self.libc("syscall", *[I64] * 4), arguments)
        rows = self.pointer(rows, I64)

        def one(i, _):
            self.store(I64(PENDING), self.row(rows, i)[0], I64(GOT))

        self.loop(I64(0), begun, 1, one)


class _Land(_Rows):
    """Writes ``run(number of io_getevents, context, events to wait for, memory for events, most)``.

    It takes the events and copies their bytes to their place in one call, so that no interrupt
    comes between.
    """

    def write(self):
        number, context, least, memory, most = self.arguments
        events, syscall = self.pointer(memory, I64), self.libc("syscall", *[I64] * 6)
        n = self.b.call(syscall, [number, context, least, most, memory, I64(0)])

        def one(i, _):
            data, got = self.fields(events, self.mul(i, 4), 0, 2)
            row, place, needed = self.row(self.pointer(data, I64), I64(0))
            # The end of a file may be in the last page.
            self.land(row, place, self.b.icmp_signed(">=", got, needed))

        self.loop(I64(0), n, 1, one)

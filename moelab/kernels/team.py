"""A team of threads that wait for work in native code, so that sharing even little work pays.

To hand work to a Python thread takes 7 to 12 us; to the team, 1.5 us (two cores of an AMD EPYC).
The caller and the threads each take piece after piece of a kernel's work. A thread that finds no
work looks for it for ``SPIN_S`` seconds, then sleeps. If the team is busy, a caller computes alone.
"""

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

import numpy as np

from . import code
from .code import I32, I64, Code, Kernel, ir

SPIN_S = 2e-4
# The fewest multiplications and additions of a shared job. With less work one thread is done before
# the team has begun.
SHARED_WORK = 100_000
PIECES = 4  # pieces for each thread, so that a delayed thread computes fewer
YIELD_SPINS = 64  # looks for work between two calls of ``sched_yield``
# Fields of a team, each in a cache line of its own. JOB holds in one word the number of the job,
# the number of its pieces, and the next piece. So a thread takes a piece by one compare-and-swap,
# which fails if the job has changed meanwhile.
JOB, DONE, BUSY, AWAKE, KERNEL = range(0, 40, 8)
ARGUMENTS = KERNEL + 1
PAUSE = {"x86_64": ["llvm.x86.sse2.pause"], "arm64": ["llvm.aarch64.hint", 1]}
PAUSE["aarch64"] = PAUSE["arm64"]
PIECES_BITS = NEXT_BITS = 16
MOST_PIECES = 2**NEXT_BITS - 1


def pieces(work: int, most: int) -> int:
    """Return the number of pieces, at most ``most``, for a job of ``work`` multiply-adds."""
    n = code.num_threads() if work >= SHARED_WORK else 1
    return 1 if n == 1 else max(1, min(n * PIECES, most, MOST_PIECES))


def run(kernel: Kernel, *given: int | np.ndarray | None, pieces: int) -> None:
    """Compute a kernel's work in pieces, on all cores. A Ctrl-C is raised after the work.

    A kernel is given numbers, and arrays by their address (None by 0).
    """
    numbers = [n if isinstance(n, int) else code.address(n) for n in given]
    if (program := code.recorded()) is not None:
        return program.add(kernel, numbers, pieces)
    if pieces == 1 or (team := _team()) is None:
        return kernel(*numbers)
    arguments = kernel.arguments(*numbers)
    team.wake()
    team.lead(team.address, kernel.address, ctypes.addressof(arguments), pieces)


class Program:
    """Calls of ``run`` that are recorded once, with their memory, and repeated in one call.

    with program.recording():
        y = rowwise.rms_norm(x, ...)  # computes nothing yet
    program.run()  # y is computed from what is in x now
    """

    def __init__(self, memory: code.Memory | None = None):
        self._calls, self._table, self.kept, self.memory = [], None, [], memory

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside the block, this thread's calls of ``run`` are recorded and compute nothing."""
        code.recording.program = self
        try:
            yield
        finally:
            code.recording.program = None

    def add(self, kernel: Kernel, numbers: Sequence[int], pieces: int) -> None:
        """Record a call of ``run``."""
        self._calls.append((kernel, kernel.arguments(*numbers), pieces))
        self._table = None

    def places(self, of: np.ndarray) -> list[tuple[ctypes.Array, int]]:
        """Return where an array's address is among the calls' arguments, for ``put``."""
        at = code.address(of)
        return [(a, i) for _, a, _ in self._calls for i, n in enumerate(a) if n == at]

    def run(self) -> None:
        """Make all calls."""
        if self._table is None:
            self._link()
        self._wake()
        self._sequence(ctypes.addressof(self._table), len(self._calls))

    def _link(self):
        """Make a table of functions and arguments; a call in several pieces calls ``Team.lead``."""
        team, rows, self._leads = _team(), [], []
        for kernel, arguments, pieces in self._calls:
            if pieces > 1 and team is not None:
                numbers = team.address, kernel.address, ctypes.addressof(arguments), pieces
                kernel, arguments = team.lead, team.lead.arguments(*numbers)
                self._leads.append(arguments)
            rows += [kernel.address, ctypes.addressof(arguments)]
        self._table = (ctypes.c_int64 * len(rows))(*rows)
        self._sequence = code.kernel_of(_Sequence, 8)
        self._wake = team.wake if team is not None else lambda: None


def put(places: list[tuple[ctypes.Array, int]], a: np.ndarray) -> None:
    """Write the address of ``a`` to the ``places`` of a program. The caller keeps ``a`` alive."""
    for arguments, i in places:
        arguments[i] = code.address(a)


class Team:
    """Threads, and the memory at ``address`` through which the kernel ``lead`` gives them work."""

    def __init__(self, num_threads: int):
        self._memory = np.zeros(KERNEL + 8, np.int64)
        self.address = self._memory.ctypes.data
        self.lead, self._serve = code.kernel_of(_Lead, 8), code.kernel_of(_Serve, 8)
        begin = time.perf_counter()
        self._serve(self.address, 1000)  # 1000 looks for work, to time one look
        self._spins = int(SPIN_S / (time.perf_counter() - begin) * 1000)
        self._awake = ctypes.c_int64.from_address(self.address + 8 * AWAKE)
        self._ended = False
        self._beds = [threading.Lock() for _ in range(num_threads)]
        self._threads = [
            threading.Thread(target=self._live, args=(bed,), name=f"moelab-team-{i}", daemon=True)
            for i, bed in enumerate(self._beds)
        ]
        for bed, thread in zip(self._beds, self._threads):
            bed.acquire()
            thread.start()

    def _live(self, bed):
        while not self._ended:
            self._serve(self.address, self._spins)
            bed.acquire()

    def wake(self) -> None:
        """Wake the threads that sleep."""
        if self._awake.value < len(self._beds):
            for bed in self._beds:
                with suppress(RuntimeError):  # another caller has woken this thread
                    bed.release()

    def end(self) -> None:
        """End the threads, so that none is in native code when the interpreter frees that code."""
        self._ended = True
        for thread in self._threads:
            while thread.is_alive():
                self._awake.value = 0
                self.wake()
                thread.join(1e-3)


@cache
def _team():
    """The team of this process; None if there is only one core."""
    if code.num_threads() == 1:
        return None
    team = Team(code.num_threads() - 1)
    atexit.register(team.end)
    return team


os.register_at_fork(after_in_child=_team.cache_clear)  # a fork has none of the threads


class _Shared(Code):
    """Code that ``_Lead`` and ``_Serve`` share."""

    def set_up(self, team):
        b = self.b
        self.team, self.spins = self.pointer(team, I64), b.alloca(I64)
        b.store(I64(0), self.spins)
        # The processor's instruction for a waiting thread; None if the processor has none.
        name, *hint = PAUSE.get(self._module.triple.split("-")[0], [None])
        kinds, self._hint = [I32] * len(hint), [I32(n) for n in hint]
        self._pause = name and self._declare(name, ir.VoidType(), kinds)
        self._yield = self._declare("sched_yield", I32, [])
        self._run = ir.FunctionType(ir.VoidType(), [I64] * 3)

    def field(self, i):
        return self.b.gep(self.team, [I64(i)])

    def read(self, i):
        return self.b.load_atomic(self.field(i), "acquire", 8)

    def write_to(self, i, value):
        self.b.store_atomic(value, self.field(i), "release", 8)

    def count(self, i, by):
        self.b.atomic_rmw("add", self.field(i), I64(by), "acq_rel")

    def swap(self, i, old, new):
        """Set a field to ``new`` if it is ``old``; return whether it was."""
        swapped = self.b.cmpxchg(self.field(i), old, new, "acq_rel", "acquire")
        return self.b.extract_value(swapped, 1)

    def compute(self, kernel, arguments, piece, pieces):
        self.b.call(self.pointer(kernel, self._run), [arguments, piece, pieces])

    def repeat(self, body):
        """Repeat ``body``'s code while its result is true."""
        again, after = (self.function.append_basic_block() for _ in range(2))
        self.b.branch(again)
        self.b.position_at_end(again)
        self.b.cbranch(body(), again, after)
        self.b.position_at_end(after)

    def take(self):
        """Compute the next piece if no other thread takes it. Return whether a piece was left."""
        b = self.b
        job, mask = self.read(JOB), I64(MOST_PIECES)
        pieces, piece = b.and_(b.lshr(job, I64(NEXT_BITS)), mask), b.and_(job, mask)
        there = b.icmp_unsigned("<", piece, pieces)
        with b.if_then(there), b.if_then(self.swap(JOB, job, self.add(job, 1))):
            # The job's fields stay as they are until this piece is done.
            kernel, arguments = (self.load(self.team, i, I64, 8) for i in (KERNEL, ARGUMENTS))
            self.compute(kernel, arguments, piece, pieces)
            self.count(DONE, 1)
        return there

    def rest(self):
        """Pause, add 1 to ``spins``, and now and then let another thread have the core."""
        b = self.b
        if self._pause:
            b.call(self._pause, self._hint)
        spins = b.load(self.spins)
        often = b.and_(spins, I64(YIELD_SPINS - 1))
        with b.if_then(b.icmp_signed("==", often, I64(YIELD_SPINS - 1))):
            b.call(self._yield, [])
        b.store(self.add(spins, 1), self.spins)


class _Lead(_Shared):
    """Posts a kernel's job, takes part, and waits for the end."""

    def write(self, team, kernel, arguments, pieces):
        self.set_up(team)
        b = self.b

        def waiting():
            self.rest()
            return b.icmp_unsigned("<", self.read(DONE), pieces)

        with b.if_else(self.swap(BUSY, I64(0), I64(1))) as (lead, alone):
            with lead:
                self.store(kernel, self.team, KERNEL)
                self.store(arguments, self.team, ARGUMENTS)
                self.write_to(DONE, I64(0))
                number = b.lshr(self.read(JOB), I64(NEXT_BITS + PIECES_BITS))
                number = b.shl(self.add(number, 1), I64(PIECES_BITS))
                self.write_to(JOB, b.shl(b.or_(number, pieces), I64(NEXT_BITS)))
                self.repeat(self.take)
                self.repeat(waiting)
                self.write_to(BUSY, I64(0))
            with alone, self.loop(0, pieces) as piece:
                self.compute(kernel, arguments, piece, pieces)


class _Serve(_Shared):
    """Takes pieces until it has found none in ``spins`` looks in a row."""

    def write(self, team, spins):
        self.set_up(team)
        b = self.b

        def look():
            with b.if_else(self.take()) as (there, none):
                with there:
                    b.store(I64(0), self.spins)
                with none:
                    self.rest()
            return b.icmp_signed("<", b.load(self.spins), spins)

        self.count(AWAKE, 1)
        self.repeat(look)
        self.count(AWAKE, -1)


class _Sequence(Code):
    """Calls n functions. A table has the address of each function and of its arguments."""

    def write(self, table, n):
        table, kind = self.pointer(table, I64), ir.FunctionType(ir.VoidType(), [I64] * 3)
        with self.loop(0, n) as i:
            at = self.mul(i, 2)
            function, arguments = (self.load(table, self.add(at, k), I64) for k in (0, 1))
            self.b.call(self.pointer(function, kind), [arguments, I64(0), I64(1)])

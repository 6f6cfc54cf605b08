"""Native code that reads many ranges in one call of Python, so the GIL is released once.

It needs llvmlite; without it ``read_ranges`` loops in Python.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np

from ...kernels import code, team
from ...kernels.code import I32, I64, Code, ir

# The columns of a table of reads, one row for each call of ``preadv``: the file's descriptor, the
# first byte in the file, the address of the iovecs, how many there are, their bytes together, and
# the number that ``preadv`` returned. An iovec is the address and the length of a piece of memory.
COLUMNS = FD, OFFSET, IOV, COUNT, NBYTES, GOT = range(6)
# This flag (Linux) reads what is in the page cache and does not wait for the disk. Linux begins to
# read the rest of the range into the page cache.
NOWAIT = getattr(os, "RWF_NOWAIT", 0)
# Bytes. Below this another thread takes longer to begin than a copy from the page cache takes.
SHARED_NBYTES = 2 * 1024 * 1024
# Bytes. A read past the page cache begins and ends at a multiple of this, also in memory, so it
# goes through a buffer of the thread. Longer ranges than fit there are read through the page cache.
# The buffer is a huge page: with small ones an SSD behind virtio, which is told the place of each
# page, takes nearly twice as long.
ALIGNED, BUFFER_NBYTES, HUGE_NBYTES = 4096, 2 * 1024 * 1024, 2 * 1024 * 1024
_buffers = threading.local()


def read(table: np.ndarray, flags: int = 0, arrived: int | None = None) -> bool:
    """Read all ranges of a table, ``[n, len(COLUMNS)]`` int64, and say whether all bytes came.

    It goes on after a read that fails. ``GOT`` is filled in. ``arrived``, the address of a uint32,
    is set to 1 if all bytes came.
    """
    done = ctypes.c_uint32()
    flag = ctypes.addressof(done)
    loop()(address_of(table), len(table), flags, flag, arrived or flag)
    return bool(done.value)


def read_direct(table: np.ndarray) -> bool:
    """``read`` past the page cache; the table has descriptors that are opened for that.

    A read that failed has -1 in ``GOT``.
    """
    buffer = getattr(_buffers, "own", None)
    if buffer is None:
        buffer = _buffers.own = huge_pages(BUFFER_NBYTES)
    done = ctypes.c_uint32()
    flag = ctypes.addressof(done)
    direct_loop()(address_of(table), len(table), address_of(buffer), BUFFER_NBYTES, flag)
    return bool(done.value)


def huge_pages(nbytes: int) -> memoryview:
    """Allocate so many bytes of memory, in huge pages if Linux has some to give."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + HUGE_NBYTES, private)  # unwritten pages take no memory
    first = -address_of(memory) % HUGE_NBYTES
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, first, nbytes)
    return memoryview(memory)[first : first + nbytes]


def read_shared(table: np.ndarray, flags: int = 0) -> bool:
    """``read`` a table with as many threads as there are cores, if that takes less time."""
    n = code.num_threads() if table[:, NBYTES].sum() >= SHARED_NBYTES else 1
    if n == 1:
        return read(table, flags)
    done = ctypes.c_uint32()
    flag = ctypes.addressof(done)
    team.run(loop(), address_of(table), len(table), flags, flag, flag, pieces=min(n, len(table)))
    return bool((table[:, GOT] == table[:, NBYTES]).all())


def address_of(memory: np.ndarray | memoryview | mmap.mmap) -> int:
    """The address where writable memory begins, found faster than by numpy's ``ctypes.data``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@cache
def loop() -> Callable[[int, int, int, int, int], None] | None:
    """The function behind ``read``; None where it cannot be built."""
    name = "preadv2" if NOWAIT else "preadv"
    function = getattr(ctypes.CDLL(None), name, None)
    if code.llvm is None or function is None:
        return None
    try:
        writer = _Loop(ctypes.cast(function, ctypes.c_void_p).value)
        return writer.link(writer.compile())  # not stored: it has an address of this process
    except (OSError, RuntimeError):
        return None


class _Loop(Code):
    """Writes ``run(table, n, flags, done, arrived)``."""

    def __init__(self, preadv):
        super().__init__(5, 8)
        arguments = [I32, I64, I32, I64, *([I32] if NOWAIT else [])]
        self.preadv = self.pointer(I64(preadv), ir.FunctionType(I64, arguments))

    def write(self):
        table, n, flags, done, arrived = self.arguments
        table, b = self.pointer(table, I64), self.b

        def row(i, missing):
            at = self.mul(i, len(COLUMNS))
            fd, iov, count, offset, nbytes = (
                self.load(table, self.add(at, k), I64) for k in (FD, IOV, COUNT, OFFSET, NBYTES)
            )
            arguments = [b.trunc(fd, I32), iov, b.trunc(count, I32), offset]
            got = b.call(self.preadv, arguments + ([b.trunc(flags, I32)] if NOWAIT else []))
            self.store(got, table, self.add(at, GOT))
            return [b.or_(missing[0], b.xor(got, nbytes))]

        missing = self.loop(*self.share(n), 1, row, [I64(0)])[1][0]
        with b.if_then(b.icmp_signed("==", missing, I64(0))):
            for flag in (done, arrived):  # after the bytes, also for a GPU that watches it
                b.store_atomic(I32(1), self.pointer(flag, I32), "release", 4)


@cache
def direct_loop() -> Callable[[int, int, int, int, int], None] | None:
    """The function behind ``read_direct``; None where it cannot be built."""
    libc = ctypes.CDLL(None)
    if code.llvm is None or not hasattr(os, "O_DIRECT") or not hasattr(libc, "pread"):
        return None
    try:
        functions = [ctypes.cast(f, ctypes.c_void_p).value for f in (libc.pread, libc.memcpy)]
        writer = _DirectLoop(*functions)
        return writer.link(writer.compile())  # not stored: it has addresses of this process
    except (OSError, RuntimeError):
        return None


class _DirectLoop(Code):
    """Writes ``run(table, n, buffer, bytes of the buffer, done)``."""

    def __init__(self, pread, memcpy):
        super().__init__(5, 8)
        self.pread = self.pointer(I64(pread), ir.FunctionType(I64, [I32, I64, I64, I64]))
        self.memcpy = self.pointer(I64(memcpy), ir.FunctionType(I64, [I64, I64, I64]))

    def write(self):
        table, n, buffer, size, done = self.arguments
        table, b = self.pointer(table, I64), self.b

        def row(i, missing):
            at = self.mul(i, len(COLUMNS))
            fd, iov, count, offset, nbytes = (
                self.load(table, self.add(at, k), I64) for k in (FD, IOV, COUNT, OFFSET, NBYTES)
            )
            before = b.and_(offset, I64(ALIGNED - 1))
            needed = b.add(before, nbytes)
            whole = b.and_(self.add(needed, ALIGNED - 1), I64(-ALIGNED))
            # A range that does not fit into the buffer reads 0 bytes, so it counts as missing.
            whole = b.select(b.icmp_signed("<=", whole, size), whole, I64(0))
            got = b.call(self.pread, [b.trunc(fd, I32), buffer, whole, b.sub(offset, before)])
            arrived = b.icmp_signed(">=", got, needed)  # the end of a file may be in the last page
            iovecs = self.pointer(iov, I64)

            def part(j, places):
                address, length = (
                    self.load(iovecs, self.add(self.mul(j, 2), k), I64, align=8) for k in (0, 1)
                )
                b.call(self.memcpy, [address, places[0], length])
                return [b.add(places[0], length)]

            count = b.select(arrived, count, I64(0))
            self.loop(I64(0), count, 1, part, [b.add(buffer, before)])
            self.store(b.select(arrived, nbytes, I64(-1)), table, self.add(at, GOT))
            return [b.or_(missing[0], b.xor(b.zext(arrived, I64), I64(1)))]

        missing = self.loop(I64(0), n, 1, row, [I64(0)])[1][0]
        with b.if_then(b.icmp_signed("==", missing, I64(0))):
            b.store_atomic(I32(1), self.pointer(done, I32), "release", 4)

"""Native code, compiled by llvmlite: one call releases the GIL once and reads many ranges."""

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np

from ...kernels import code, team
from ...kernels.code import I32, I64, Code

# The columns of a table of reads, one row for each range:
#   FD, OFFSET      the file's descriptor, the first byte in the file
#   EXPERT, TENSOR  the expert and the tensor, for messages of errors
#   IOV, COUNT      the iovecs' address and number; each iovec is a piece of memory: address, bytes
#   NBYTES          the bytes of all pieces
#   ROOM            the address of memory where the range's whole blocks may land; 0: there is none
#   GOT             how many bytes came; negative if the read failed or has not ended
COLUMNS = FD, OFFSET, EXPERT, TENSOR, IOV, COUNT, NBYTES, ROOM, GOT = range(9)
# With this flag (Linux) a read takes what is in the page cache and does not wait for the disk.
# Linux then begins to read the rest of the range into the page cache.
NOWAIT = getattr(os, "RWF_NOWAIT", 0)
PREADV = "preadv2" if NOWAIT else "preadv"
# In bytes. A read past the page cache begins and ends at multiples of ``alignment``, in the file
# and in memory. If a slot has no room for whole blocks, the thread reads into a buffer of its
# own, at multiples of ``ALIGNED``; what is longer than this buffer goes through the page cache.
ALIGNED, BUFFER_NBYTES, HUGE_NBYTES = 4096, 2 * 1024 * 1024, 2 * 1024 * 1024
_buffers = threading.local()
# Linux's numbers for ``statx`` (6.1): relative path, mask, result's bytes, place of alignments.
AT_FDCWD, STATX_DIOALIGN, STATX_NBYTES, DIO_ALIGNS = -100, 0x2000, 256, 152


def read(table: np.ndarray, flags: int = 0, arrived: int | None = None) -> bool:
    """Read a table's ranges, also those after a failed range; return whether all bytes came.

    The uint32 at address ``arrived``, 0 before, becomes 1 if all bytes came and ``flags`` is 0.
    """
    done = ctypes.c_uint32() if arrived is None else ctypes.c_uint32.from_address(arrived)
    arguments = address_of(table), len(table), flags, ctypes.addressof(done)
    # A copy from the page cache keeps a core busy, so several threads share it. Less than 2 MB are
    # copied in less time than a thread needs to start.
    if flags and code.num_threads() > 1 and table[:, NBYTES].sum() >= 2 * 1024 * 1024:
        team.run(loop(), *arguments, pieces=min(code.num_threads(), len(table)))
        return bool((table[:, GOT] == table[:, NBYTES]).all())
    loop()(*arguments)
    return bool(done.value)


def read_direct(table: np.ndarray) -> None:
    """Read ranges past the page cache (``File.direct``); column GOT of a failed read is -1."""
    buffer = getattr(_buffers, "own", None)
    if buffer is None:
        buffer = _buffers.own = huge_pages(BUFFER_NBYTES)
    direct_loop()(address_of(table), len(table), address_of(buffer), BUFFER_NBYTES)


@cache
def alignment(path: str) -> int:
    """The alignment of reads past the page cache: ``ALIGNED`` if unknown, 0 if impossible."""
    statx, found = getattr(ctypes.CDLL(None), "statx", None), bytearray(STATX_NBYTES)
    if statx is None or statx(
        AT_FDCWD,
        os.fsencode(path),
        0,
        STATX_DIOALIGN,
        (ctypes.c_char * len(found)).from_buffer(found),
    ):
        return ALIGNED
    mask, *_ = struct.unpack_from("I", found)
    return max(struct.unpack_from("2I", found, DIO_ALIGNS)) if mask & STATX_DIOALIGN else ALIGNED


def huge_pages(nbytes: int) -> memoryview:
    """Allocate ``nbytes`` of memory, in huge pages if Linux has some to give."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + HUGE_NBYTES, private)  # unwritten pages take no memory
    first = -address_of(memory) % HUGE_NBYTES
    with suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, first, nbytes)
    return memoryview(memory)[first : first + nbytes]


def address_of(memory: np.ndarray | memoryview | mmap.mmap) -> int:
    """The address where writable memory begins, found faster than by numpy's ``ctypes.data``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def loop() -> Callable[[int, int, int, int], None] | None:
    """The function behind ``read``; None where it cannot be built."""
    return built(_Loop, PREADV)


def direct_loop() -> Callable[[int, int, int, int], None] | None:
    """The function behind ``read_direct``; None where it cannot be built."""
    return built(_DirectLoop, "pread", "memmove") if hasattr(os, "O_DIRECT") else None


@cache
def built(kind: type["TableCode"], *functions: str) -> Callable | None:
    """The compiled code of a class; None without llvmlite or a function of libc, or if it fails."""
    libc = ctypes.CDLL(None)
    if code.llvm is None or not all(hasattr(libc, name) for name in functions):
        return None
    try:
        writer = kind(8)
        return writer.link(writer.compile())  # not stored: ``stored`` hashes kernels/ only
    except (OSError, RuntimeError):
        return None


class TableCode(Code):
    """Code that reads the rows of a table of reads."""

    def fields(self, pointer, at, *places):
        """Load the 64-bit numbers at a pointer's indices ``at`` + ``places``."""
        return [self.load(pointer, self.add(at, k), I64, 8) for k in places]

    def land(self, row, place, arrived):
        """Move a row's bytes from ``place`` to the row's iovecs if they arrived; fill in GOT."""
        iov, count, nbytes = self.fields(row, I64(0), IOV, COUNT, NBYTES)
        iovecs, memmove = self.pointer(iov, I64), self.libc("memmove", I64, I64, I64)

        def part(j, places):
            to, length = self.fields(iovecs, self.mul(j, 2), 0, 1)
            is_there = self.b.icmp_signed("==", to, places[0])
            self.b.call(memmove, [to, places[0], self.b.select(is_there, I64(0), length)])
            return [self.add(places[0], length)]

        self.loop(I64(0), self.b.select(arrived, count, I64(0)), 1, part, [place])
        self.store(self.b.select(arrived, nbytes, I64(-1)), row, I64(GOT))

    def libc(self, name, *arguments):
        """A function of the C library that returns 64 bits."""
        return self._declare(name, I64, arguments)


class _Loop(TableCode):
    signature = "table n flags arrived"

    def write(self):
        table, n, flags, arrived = self.arguments
        table, b = self.pointer(table, I64), self.b
        more = [b.trunc(flags, I32)] if NOWAIT else []
        preadv = self.libc(PREADV, I32, I64, I32, I64, *[I32 for _ in more])

        def row(i, missing):
            at = self.mul(i, len(COLUMNS))
            fd, iov, count, offset, nbytes = self.fields(table, at, FD, IOV, COUNT, OFFSET, NBYTES)
            got = b.call(preadv, [b.trunc(fd, I32), iov, b.trunc(count, I32), offset, *more])
            self.store(got, table, self.add(at, GOT))
            return [b.or_(missing[0], b.xor(got, nbytes))]

        missing = self.loop(*self.share(n), 1, row, [I64(0)])[1][0]
        with b.if_then(b.icmp_signed("==", missing, I64(0))):
            # After the bytes have arrived, also for a GPU that watches it.
            b.store_atomic(I32(1), self.pointer(arrived, I32), "release", 4)


class _DirectLoop(TableCode):
    signature = "table n buffer size"

    def write(self):
        table, n, buffer, size = self.arguments
        table, b = self.pointer(table, I64), self.b
        pread = self.libc("pread", I32, I64, I64, I64)

        def row(i, _):
            row = b.gep(table, [self.mul(i, len(COLUMNS))])
            fd, offset, nbytes = self.fields(row, I64(0), FD, OFFSET, NBYTES)
            before = b.and_(offset, I64(ALIGNED - 1))
            needed = b.add(before, nbytes)
            whole = b.and_(self.add(needed, ALIGNED - 1), I64(-ALIGNED))
            # A range that does not fit into the buffer reads 0 bytes, so it counts as missing.
            whole = b.select(b.icmp_signed("<=", whole, size), whole, I64(0))
            got = b.call(pread, [b.trunc(fd, I32), buffer, whole, b.sub(offset, before)])
            # The read gives fewer bytes than ``whole`` if the file ends in the last block.
            self.land(row, b.add(buffer, before), b.icmp_signed(">=", got, needed))

        self.loop(I64(0), n, 1, row)

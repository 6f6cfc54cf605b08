"""A reader for a CUDA GPU: threads read into pinned memory, from which the GPU copies (``cuda``).

Two kinds of bytes do not take this way but are read into MLX's unified memory: experts of which
some bytes are converted after they have arrived, and experts that prefetch threads read.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .. import cuda
from .file import check_unchanged
from .native import COUNT, IOV, NBYTES, OFFSET, address_of
from .ranges import Ranges, Read, read_ranges
from .reader import Reader

# Bytes of a block of pinned memory, and blocks of a model; a call that gets none makes one more.
BLOCK_NBYTES, NUM_BLOCKS = 2 * 1024 * 1024, 96


class Block(cuda.Pinned):
    """Pinned memory that ranges of files are read into, and a flag that says when they arrived."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes + 4)
        self.view = memoryview(self.bytes)[:nbytes]
        self.arrived = self.bytes[nbytes:].view(np.uint32)  # the flag: 0 until the reads have ended
        self.flag = self.address + nbytes  # the flag's address


class Piece(NamedTuple):
    """Rows of a call's reads that fit into one block, where they lie one behind the other."""

    table: np.ndarray  # as in ``Ranges``, with one iovec for each row
    iovecs: np.ndarray  # [n, 2]: the first byte in the block, and the bytes
    to: list[tuple[int, int]]  # addresses and bytes that the GPU copies all of them to
    ranges: Ranges  # the call's
    rows: np.ndarray  # [n]: the range that each row is a part of

    def into(self, block: Block) -> Ranges:
        """The reads that fill a block; call it once."""

        def reads():
            places = zip(self.rows, self.table[:, OFFSET].tolist(), self.iovecs.tolist())
            for row, offset, (to, nbytes) in places:
                view = block.view[to - block.address :][:nbytes]
                yield self.ranges[row]._replace(offset=offset, nbytes=nbytes, views=[view])

        nbytes = int(self.iovecs[:, 1].sum())
        self.iovecs[:, 0] += block.address
        return Ranges(self.table, nbytes, self.ranges.files, lambda: [*reads()])


def pieces(ranges: Ranges, readers: int) -> Iterator[Piece]:
    """Divide ranges into about as many pieces as readers; a range may be longer than a block."""
    sizes = ranges.table[:, NBYTES]
    counts = -(-sizes // BLOCK_NBYTES)
    rows = np.arange(len(sizes)).repeat(counts)
    before = (np.arange(len(rows)) - (counts.cumsum() - counts)[rows]) * BLOCK_NBYTES
    table = ranges.table[rows]
    table[:, OFFSET] += before
    table[:, NBYTES] = np.minimum(table[:, NBYTES] - before, BLOCK_NBYTES)
    sizes = table[:, NBYTES]
    firsts = _divide(sizes.tolist(), readers)
    lasts, starts = [*firsts[1:], len(table)], sizes.cumsum() - sizes
    starts -= starts[firsts].repeat(np.subtract(lasts, firsts))
    iovecs = np.stack((starts, sizes), 1)
    table[:, IOV] = address_of(iovecs) + iovecs[0].nbytes * np.arange(len(table))
    table[:, COUNT] = 1
    places = _cut(chain.from_iterable(ranges.parts), np.add.reduceat(sizes, firsts).tolist())
    for first, last, to in zip(firsts, lasts, places):
        yield Piece(table[first:last], iovecs[first:last], to, ranges, rows[first:last])


def _divide(sizes, readers):
    """The first row of each piece, by the bytes of each row."""
    most = min(BLOCK_NBYTES, sum(sizes) / readers)
    firsts, size = [], most
    for i, nbytes in enumerate(sizes):
        if size + nbytes > most:
            firsts.append(i)
            size = 0
        size += nbytes
    return firsts


def _cut(parts, sizes):
    """Divide parts of memory, each an address and its bytes, into groups of so many bytes."""
    parts = deque(parts)
    for size in sizes:
        group = []
        while size:
            address, nbytes = parts.popleft()
            if nbytes > size:
                parts.appendleft((address + size, nbytes - size))
                nbytes = size
            group.append((address, nbytes))
            size -= nbytes
        yield group


class Begun:
    """The reads that one ``start`` began; ``queued`` pieces wait for a block."""

    def __init__(self, queued: Iterable[Piece] = (), files=(), there: Sequence[cuda.Copy] = ()):
        self.queued, self.files = deque(queued), files
        self.there = there  # copies of bytes that need not be read
        self.reading = []  # pieces that are read: (piece, block, future)
        self.in_graph = False  # whether a kernel that was built copies them

    @property
    def futures(self) -> list[Future]:
        """The reads that are running or have ended."""
        return [future for *_, future in self.reading]

    def done(self) -> bool:
        """Whether all reads have ended."""
        return not self.queued and all(future.done() for future in self.futures)

    def copies(self) -> list[cuda.Copy]:
        """The copies of all bytes that have a block or need not be read."""
        copies = [*self.there]
        for piece, block, _ in self.reading:
            source = block.address
            for to, nbytes in piece.to:
                copies.append(cuda.Copy(source, to, nbytes, block.flag))
                source += nbytes
        return copies


class UploadingReader(Reader):
    """A ``Reader`` whose threads read into pinned memory, from which the GPU copies.

    If any range of a call has no ``parts``, the call is read as ``Reader`` reads it.
    """

    copies_in_graph = True

    def __init__(self, mailbox: cuda.Mailbox, readers: int = 8, direct: bool = False):
        super().__init__(readers, direct)
        self._mailbox = mailbox
        self._blocks = []
        self._free = []
        self._copying = []  # blocks that the graph may still copy

    def start(self, reads: Sequence[Read]) -> Begun | list[Future]:
        self._wait()
        parts = reads.parts if isinstance(reads, Ranges) else [r.parts for r in reads]
        if not (parts and all(parts)):
            return super().start(reads)
        reads = reads if isinstance(reads, Ranges) else Ranges.of(reads)
        begun = Begun(pieces(reads, self.readers), reads.files)
        if not self._read_inline(reads, lambda: self._read_more(begun, _now)):
            self._read_more(begun, self._submit)
        return begun

    def _wait(self):
        """Wait until the GPU has copied all blocks that a graph copies."""
        if self._copying:
            self._mailbox.wait()
            self._free += self._copying
            self._copying = []

    def _read_more(self, begun, submit):
        """Begin to read as many queued pieces as there are blocks for, one at least."""
        while begun.queued and (block := self._take(must=not begun.reading)) is not None:
            piece = begun.queued.popleft()
            block.arrived[0] = 0
            future = submit(self._read_piece, piece.into(block), block)
            begun.reading.append((piece, block, future))

    def _take(self, must):
        """A free block, or a new one; None if there are ``NUM_BLOCKS``, unless it ``must`` be."""
        if self._free:
            return self._free.pop()
        if len(self._blocks) >= NUM_BLOCKS and not must:
            return None
        self._blocks.append(Block(BLOCK_NBYTES))
        return self._blocks[-1]

    def _read_piece(self, reads, block):
        begin = time.perf_counter()
        try:
            # Native code sets the flag without waiting for the GIL.
            read_ranges(reads, block.flag, self.direct)
        finally:
            block.arrived[0] = 1  # also after an error: the GPU waits for it
        self._count(len(reads), reads.nbytes, begin, reads.nbytes)

    def copies(self, begun: Begun) -> list[cuda.Copy] | None:
        """The copies that one kernel makes in place of ``finish``; None if one kernel cannot.

        Call ``finish`` before the result is used: it raises if a read failed.
        """
        copies = begun.copies()
        if begun.queued or len(copies) > cuda.MAX_COPIES or not cuda.may_wait():
            return None
        begun.in_graph = True
        return copies

    def finish(self, begun: Begun | list[Future]) -> None:
        if not isinstance(begun, Begun):
            return super().finish(begun)
        super().finish(begun.futures)
        if begun.in_graph:
            self._copying += [block for _, block, _ in begun.reading]
        while (begun.there or begun.reading) and not begun.in_graph:
            copies = begun.copies()
            for i in range(0, len(copies), cuda.MAX_COPIES):
                self._mailbox.copy(copies[i : i + cuda.MAX_COPIES])
            self._free += [block for _, block, _ in begun.reading]
            begun.there, begun.reading = (), []
            self._read_more(begun, self._submit)
            super().finish(begun.futures)
        check_unchanged(begun.files)

    def stop(self) -> None:
        super().stop()
        for block in self._blocks:
            block.arrived[0] = 1  # the GPU waits for reads that were cancelled, too
        self._mailbox.forget()
        mx.synchronize()
        self._free, self._copying = self._blocks.copy(), []

    def close(self) -> None:
        super().close()
        self._blocks, self._free = [], []


def _now(function, *args):
    """Like a thread pool's ``submit``, but done in this thread."""
    function(*args)
    done = Future()
    done.set_result(None)
    return done

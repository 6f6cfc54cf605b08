"""A reader for a CUDA GPU: threads read into pinned memory, from which the GPU copies."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .. import cuda
from .flight import Flight
from .ranges import Ranges
from .reader import Reader, Threads


class Staging(cuda.Pinned):
    """Pinned memory for the ranges of a call, and flags that say which parts have arrived."""

    def __init__(self, nbytes: int, flags: int):
        # A power of two, so that calls of about the same size can use it again.
        self.nbytes = max(256 * 1024, 1 << (nbytes - 1).bit_length())
        super().__init__(self.nbytes + 4 * flags)
        self.flags = self.bytes[self.nbytes :].view(np.uint32)  # 0 until the reads have ended
        self.flag = self.address + self.nbytes  # the first flag's address


class Begun(Threads):
    """The reads that one ``start`` began, and the GPU's copies of their bytes."""

    def __init__(self, copies: Sequence[cuda.Copy] = (), memory: Staging | None = None):
        super().__init__([])
        self.copies, self.memory = [*copies], memory
        self.is_in_graph = False  # whether a kernel of MLX's graph makes the copies

    def in_graph(self) -> list[cuda.Copy] | None:
        """The copies if a kernel of MLX's graph makes them; None if ``finish`` makes them."""
        self.is_in_graph = len(self.copies) <= cuda.MAX_COPIES and cuda.may_wait()
        return self.copies if self.is_in_graph else None


class UploadingReader(Reader):
    """A ``Reader`` whose ``start`` reads into pinned memory if a GPU may copy the bytes."""

    copies_in_graph = True

    def __init__(self, mailbox: cuda.Mailbox, readers: int = 8, direct: bool = False):
        super().__init__(readers, direct)
        self._mailbox = mailbox
        self._memory = []  # all pinned memory
        self._free = []
        self._copying = []  # memory from which the graph may still copy

    def start(self, ranges: Ranges, step: int | None = None) -> list[Flight | Threads]:
        self._wait()
        if not ranges.may_copy:
            return super().start(ranges, step)
        self.check_open()
        self._quiet.clear()
        memory = self._take(ranges.nbytes)
        memory.flags[:] = 0
        begun, parts = Begun(memory=memory), self._divided(ranges.moved(memory.address))
        for i, part in enumerate(parts):
            if self._is_small(ranges):
                self._read_piece(part, memory, i)
            else:
                begun.futures.append(self._pool.submit(self._read_piece, part, memory, i))
        begun.copies = _copies(memory, parts, ranges.memory())
        self._demanded.append(begun)
        return [begun]

    def _wait(self):
        """Wait until the GPU has made all copies of MLX's graph, and free their memory."""
        if self._copying:
            self._mailbox.wait()
            self._free += self._copying
            self._copying = []

    def _take(self, nbytes):
        """Take the smallest free memory of at least ``nbytes``, or new memory."""
        large = [memory for memory in self._free if memory.nbytes >= nbytes]
        if not large:
            self._memory.append(Staging(nbytes, self.readers))
            return self._memory[-1]
        memory = min(large, key=lambda memory: memory.nbytes)
        self._free.remove(memory)
        return memory

    def _read_piece(self, ranges, memory, i):
        try:
            # Native code sets the flag without waiting for the GIL.
            self.read_here(ranges, memory.flag + 4 * i)
        finally:
            memory.flags[i] = 1  # also after an error: the GPU waits for the flag

    def finish(self, reads: list[Flight | Threads]) -> float:
        took_s = super().finish(reads)
        for begun in reads:
            if not isinstance(begun, Begun):
                continue
            if not begun.is_in_graph:
                for i in range(0, len(begun.copies), cuda.MAX_COPIES):
                    self._mailbox.copy(begun.copies[i : i + cuda.MAX_COPIES])
                self._mailbox.wait()
            if begun.memory is not None:
                (self._copying if begun.is_in_graph else self._free).append(begun.memory)
        return took_s

    def read_in_turn(self, ranges: Ranges) -> None:
        for one in ranges.divided(1):
            self.read(one)

    def stop(self) -> None:
        super().stop()
        for memory in self._memory:
            memory.flags[:] = 1  # the GPU also waits for the flags of cancelled reads
        self._mailbox.sent = None  # nothing computes this array after an error
        mx.synchronize()
        self._free, self._copying = self._memory.copy(), []

    def close(self) -> None:
        super().close()
        self._memory, self._free = [], []


def _copies(memory, parts, pieces):
    """The copies of what ``parts`` read to pieces of memory, each an address and its bytes."""
    to, nbytes = np.array(pieces).T
    ends, part_ends = nbytes.cumsum(), np.cumsum([part.nbytes for part in parts])
    cuts = np.union1d(ends, part_ends)
    firsts = np.append(0, cuts[:-1])
    piece, part = (np.searchsorted(e, firsts, "right") for e in (ends, part_ends))
    into = to[piece] + firsts - (ends - nbytes)[piece]
    rows = memory.address + firsts, into, cuts - firsts, memory.flag + 4 * part
    return [cuda.Copy(*row) for row in np.stack(rows, 1).tolist()]

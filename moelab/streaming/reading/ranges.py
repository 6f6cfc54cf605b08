"""Ranges of files, and the memory that they are read into."""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from . import native
from .file import File, ReadError


class Read(NamedTuple):
    """One range of a file and the memory that it is read into."""

    file: File  # from ``Reader.open``
    offset: int  # the first byte in the file
    nbytes: int
    views: list[memoryview]  # writable bytes, filled one after the other
    tensor: str = "bytes"  # the tensor's name, for messages
    expert: int = -1  # for messages
    # Address and length of the memory behind each view, if a GPU may copy the bytes there
    # (``UploadingReader``).
    parts: Sequence[tuple[int, int]] = ()

    def __str__(self):
        return f"{self.file.path}: {self.tensor}, expert {self.expert}, offset {self.offset}"


class Ranges(Sequence):
    """Reads as a table, ``[n, len(native.COLUMNS)]`` int64, for native code.

    ``reads`` makes the ``Read``s; it is called when the first one is asked for.
    """

    def __init__(
        self,
        table: np.ndarray,
        nbytes: int,
        files: Collection[File],
        reads: Callable[[], list[Read]],
        parts: Sequence[Sequence[tuple[int, int]]] = (),
    ):
        self.table, self.nbytes, self.files, self._make = table, nbytes, files, reads
        self.parts = parts

    @classmethod
    def of(cls, reads: Sequence[Read]) -> "Ranges":
        """Make a table of reads."""
        iovecs = [(native.address_of(view), len(view)) for r in reads for view in r.views]
        iovecs = np.array(iovecs, np.int64)
        rows, at = [], native.address_of(iovecs)
        for r in reads:
            rows.append((r.file.fd, r.offset, at, len(r.views), r.nbytes, 0))
            at += len(r.views) * iovecs[0].nbytes
        files, nbytes = {r.file for r in reads}, sum(r.nbytes for r in reads)
        parts = [r.parts for r in reads]
        ranges = cls(np.array(rows, np.int64), nbytes, files, lambda: reads, parts)
        ranges.iovecs = iovecs  # the table has their addresses
        return ranges

    @cached_property
    def _reads(self):
        return self._make()

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        """A ``Read``; for a slice or an array of numbers, ``Ranges``."""
        if isinstance(i, (int, np.integer)):
            return self._reads[i]
        table, numbers = self.table[i], np.arange(len(self))[i]
        nbytes = int(table[:, native.NBYTES].sum())
        return Ranges(table, nbytes, self.files, lambda: [self[n] for n in numbers])

    def read_direct(self) -> Sequence[Read]:
        """Read all ranges past the page cache; return those of which not all bytes were read."""
        table = self.direct_table()
        if table is None:
            return self
        return () if native.read_direct(table) else self.left(table)

    def direct_table(self) -> np.ndarray | None:
        """The table with descriptors that read past the page cache; None where there are none."""
        direct = {file.fd: file.direct for file in self.files}
        if native.direct_loop() is None or None in direct.values():
            return None
        table = self.table.copy()
        table[:, native.FD] = [direct[fd] for fd in table[:, native.FD].tolist()]
        return table

    def read(self, flags: int = 0, arrived: int | None = None) -> Sequence[Read]:
        """Read all ranges by ``native.read``; return those of which not all bytes were read.

        ``arrived`` is used without flags alone: with flags several threads may read.
        """
        if native.loop() is None:
            return self
        if flags:  # a copy from the page cache keeps a core busy, so several cores are faster
            read = native.read_shared(self.table, flags)
        else:
            read = native.read(self.table, flags, arrived)
        return () if read else self.left(self.table)

    def left(self, table):
        """The ranges that were not read whole, by a table whose ``GOT`` is filled in."""
        return self[np.flatnonzero(table[:, native.GOT] != table[:, native.NBYTES])]


def files_of(reads: Sequence[Read]) -> Collection[File]:
    """The files that ranges are in."""
    return reads.files if isinstance(reads, Ranges) else {r.file for r in reads}


def nbytes_of(reads: Sequence[Read]) -> int:
    """The bytes of ranges."""
    return reads.nbytes if isinstance(reads, Ranges) else sum(r.nbytes for r in reads)


def read_ranges(reads: Iterable[Read], arrived: int | None = None, direct: bool = False) -> None:
    """Read ranges one after the other, in native code if they are ``Ranges``.

    A range that native code has not read whole is read again here, and raises if that fails.
    ``arrived`` (see ``native.read``) is not set by reads past the page cache (``direct``).
    """
    if isinstance(reads, Ranges):
        reads = reads.read_direct() if direct else reads.read(arrived=arrived)
    for r in reads:
        try:
            got = os.preadv(r.file.fd, r.views, r.offset)
            while 0 < got < r.nbytes:  # a signal interrupted it, or the kernel limits a read
                more = os.preadv(r.file.fd, _after(r.views, got), r.offset + got)
                if more == 0:
                    break
                got += more
        except OSError as e:
            raise ReadError(
                e.errno,
                f"{r}: {e.strerror}. Try again with a new prompt cache; ranks start again. If it "
                "fails again, check the disk.",
            ) from e
        if got != r.nbytes:
            raise ReadError(
                f"{r}: expected {r.nbytes} bytes, got {got}. The file is shorter than "
                "when it was loaded: restore it, then load again."
            )


def _after(views, nbytes):
    """The parts of some views that are still empty when their first bytes are filled."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []

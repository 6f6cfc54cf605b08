"""Ranges of files, and the memory that they are read into."""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from . import native
from .file import File, ReadError
from .native import COLUMNS, COUNT, EXPERT, FD, GOT, IOV, NBYTES, OFFSET, ROOM, TENSOR

PIECE_NBYTES = 2 * 1024 * 1024  # ``Ranges.moved`` divides a range of more bytes


@dataclass(eq=False)
class Ranges:
    """A table of reads for native code."""

    table: np.ndarray  # ``[n, len(native.COLUMNS)]`` of int64
    files: Mapping[int, File]  # the file of each descriptor
    tensors: Sequence[str]  # the tensors' names, by their number in column ``TENSOR``
    may_copy: bool = False  # whether a GPU may copy the bytes to where they belong
    align: int = native.ALIGNED  # whole blocks begin at multiples of this
    kept: Any = None  # what the table's addresses point into: it must live as long as the table

    @classmethod
    def of(cls, reads: Sequence[tuple[File, int, Sequence[memoryview]]]) -> "Ranges":
        """Make a table of reads: each has a file, an offset, and pieces of memory to fill."""
        iovecs = [(native.address_of(view), len(view)) for *_, views in reads for view in views]
        iovecs = np.array(iovecs, np.int64)
        table, at = np.zeros((len(reads), len(COLUMNS)), np.int64), native.address_of(iovecs)
        for i, (file, offset, views) in enumerate(reads):
            table[i, :ROOM] = file.fd, offset, i, 0, at, len(views), sum(map(len, views))
            at += len(views) * iovecs[0].nbytes
        return cls(table, {file.fd: file for file, *_ in reads}, ["bytes"], kept=(reads, iovecs))

    def __len__(self):
        return len(self.table)

    def __getitem__(self, rows: slice | np.ndarray) -> "Ranges":
        given = self.files, self.tensors, self.may_copy, self.align, self.kept
        return Ranges(self.table[rows], *given)

    def divided(self, step: int | None) -> Iterator["Ranges"]:
        """Parts of ``step`` ranges each (None: all in one)."""
        if 0 < len(self) <= (step or len(self)):
            return iter((self,))
        return (self[i : i + step] for i in range(0, len(self), step or 1))

    @cached_property
    def nbytes(self) -> int:
        return int(self.table[:, NBYTES].sum())

    def moved(self, address: int) -> "Ranges":
        """The same reads into contiguous memory from ``address`` on; long ranges are divided."""
        counts = -(-self.table[:, NBYTES] // PIECE_NBYTES)
        rows = np.arange(len(self)).repeat(counts)
        before = (np.arange(len(rows)) - (counts.cumsum() - counts)[rows]) * PIECE_NBYTES
        table = self.table[rows]
        sizes = np.minimum(table[:, NBYTES] - before, PIECE_NBYTES)
        iovecs = np.stack((address + sizes.cumsum() - sizes, sizes), 1)
        table[:, OFFSET] += before
        table[:, NBYTES], table[:, COUNT], table[:, ROOM] = sizes, 1, 0
        table[:, IOV] = native.address_of(iovecs) + iovecs[0].nbytes * np.arange(len(table))
        return Ranges(table, self.files, self.tensors, kept=iovecs)

    def memory(self) -> list[tuple[int, int]]:
        """Address and bytes of each piece of memory that the ranges are read into."""
        return [piece for row in self.table.tolist() for piece in _pieces(row)]

    def read_direct(self) -> "Ranges":
        """Read all ranges past the page cache; return the ranges that were not read whole."""
        table = self.direct_table()
        if table is None:
            return self
        native.read_direct(table)
        return self.left(table)

    def direct_table(self) -> np.ndarray | None:
        """The table with ``File.direct`` descriptors; None if direct reads are impossible."""
        direct = {fd: file.direct for fd, file in self.files.items()}
        if native.direct_loop() is None or None in direct.values():
            return None
        table = self.table.copy()
        table[:, FD] = [direct[fd] for fd in table[:, FD].tolist()]
        return table

    def read(self, flags: int = 0, arrived: int | None = None) -> "Ranges":
        """Read all ranges by ``native.read``; return the ranges that were not read whole."""
        if native.loop() is None:
            return self
        return self[:0] if native.read(self.table, flags, arrived) else self.left(self.table)

    def left(self, table: np.ndarray) -> "Ranges":
        """The ranges that were not read whole, as column ``GOT`` of ``table`` says."""
        return self[np.flatnonzero(table[:, GOT] != table[:, NBYTES])]


def read_ranges(ranges: Ranges, arrived: int | None = None, direct: bool = False) -> None:
    """Read ranges by native code, and missing ones by ``preadv``; raise if that fails.

    Reads past the page cache (``direct``) do not set ``arrived`` (see ``native.read``).
    """
    left = ranges.read_direct() if direct else ranges.read(arrived=arrived)
    for row in left.table.tolist():
        file, offset, nbytes = ranges.files[row[FD]], row[OFFSET], row[NBYTES]
        name = f"{file.path}: {ranges.tensors[row[TENSOR]]}, expert {row[EXPERT]}, offset {offset}"
        views = [_view(*piece) for piece in _pieces(row)]
        try:
            got = os.preadv(file.fd, views, offset)
            while 0 < got < nbytes:  # a signal interrupted the read, or the system limits reads
                more = os.preadv(file.fd, _after(views, got), offset + got)
                if more == 0:
                    break
                got += more
        except OSError as e:
            raise ReadError(
                e.errno,
                f"{name}: {e.strerror}. Try again with a new prompt cache; with ranks, start all "
                "ranks again. If the read fails again, check the disk.",
            ) from e
        if got != nbytes:
            raise ReadError(
                f"{name}: expected {nbytes} bytes, got {got}. The file is shorter than "
                "when it was loaded: restore it, then load again."
            )


def _pieces(row):
    """The iovecs of a table's row: address and bytes of each."""
    numbers = (ctypes.c_int64 * (2 * row[COUNT])).from_address(row[IOV])[:]
    return zip(numbers[::2], numbers[1::2])


def _view(address, nbytes):
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _after(views, nbytes):
    """What is left of ``views`` after their first ``nbytes`` bytes."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []

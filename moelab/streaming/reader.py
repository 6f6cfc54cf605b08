"""Concurrent reads of file ranges, straight into MLX buffers.

On a CPU, experts are read by ``Reader.start`` or ``Reader.read_here``. On CUDA the GPU then copies
what was read (``cuda``), and ``StreamConfig(source="host")`` reads each expert once. ``preadv``
writes into the memory of an evaluated MLX array and releases the GIL, so a few Python threads keep
an SSD busy. The ranges of a call with slots (``Ranges``) are read by one call of native code
(``native``). On Linux the calling thread first takes what the page cache holds. This also starts
the reads of the other ranges, all at once. Where memory has little room for pages beside the slots,
reads go past the page cache (``Reader.direct``): a MB then takes 0.3 ms of a core's time and not 1,
since the system need not free a page for each page that it reads.

When a read fails, comes back short or its file has changed, ``read_here`` raises ``ReadError``
with the file, tensor, expert and offset, and the model's call raises it unchanged.
``SlotTable.commit`` is not reached for these reads, so the table holds no expert whose bytes are
missing; the experts that it evicted for them stay evicted. ``Session.call`` cancels the reads that
have not begun and waits for the others, and the next call frees the slots that prefetches had
reserved (``Session._recover``, ``SlotTable.recover``). The caller's prompt cache may hold the token
in some layers and not in others: it begins again with a new one. A prefetch that fails
is not reported: its expert is read again when a layer needs it.
"""

import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..kernels.code import num_threads
from . import native

# Bytes of a call. Up to this, reading cached pages in the calling thread ("inline") takes less
# time than handing the reads to the pool.
INLINE_NBYTES = 512 * 1024
# Bytes of a call. Up to this, the calling thread copies what the page cache holds. With two cores
# it takes less time than the pool for 16 MB at least; more cores copy faster than one.
CACHED_NBYTES = 32 * 1024 * 1024 // num_threads()
# Bytes past the page cache that are worth a thread's time.
SHARE_NBYTES = 512 * 1024
# Seconds. If inline reads turn slower than this (cold pages), use the pool ...
SLOW_S = 3e-4
# ... and retry inline every 16th small call, in case the pages are cached again.
RETRY_EVERY = 16
# Experts that are looked for in the page cache before the system is asked for many. Linux reads
# the page of each that is not there, by itself.
PROBES = 8
# Bytes. One advice to the system: Linux takes no more than its own readahead window of each.
AHEAD_NBYTES = 128 * 1024
F_RDADVISE = 44  # of macOS; Python does not name it
# Weight of the newest read in the running averages of seconds a byte. Inline reads adapt faster,
# because few of them are made while the pool reads.
PACE_WEIGHT, INLINE_PACE_WEIGHT = 0.1, 0.5


_byte = bytearray(1)  # for reads that only ask whether a byte is there


class ReadError(OSError):
    """A read failed, came back short, or its file changed while it was in use."""


class File:
    """An open file and its size and times then. It is closed with the last reference to it.

    Args:
        path (Path): The file.

    Attributes:
        path (Path): As above.
        fd (int): The file descriptor.
        stamp (tuple[int, int, int]): What ``stat`` said when it was opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self._close_direct = lambda: None
        self._close = weakref.finalize(self, os.close, self.fd)
        # Experts are read whole and in no order, so the bytes behind one are not needed next.
        # Without readahead Linux also requests all of a long read from the disk at once.
        self.set_readahead(False)
        self.stamp, self._links = self.stat(), os.fstat(self.fd).st_nlink

    def __str__(self):
        return str(self.path)

    def close(self) -> None:
        """Close it. A second call does nothing."""
        for close in (self._close, self._close_direct):
            close()

    def set_readahead(self, on: bool) -> None:
        """Let the system read more of the file than is asked for, or not.

        Args:
            on (bool): Off when a file is opened. Without effect where the system takes no advice.
        """
        if hasattr(os, "posix_fadvise"):
            advice = os.POSIX_FADV_NORMAL if on else os.POSIX_FADV_RANDOM
            os.posix_fadvise(self.fd, 0, 0, advice)
        elif hasattr(fcntl, "F_RDAHEAD"):  # macOS
            fcntl.fcntl(self.fd, fcntl.F_RDAHEAD, int(on))

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Let the system read a range into the page cache. Without effect where it takes no advice.

        Args:
            offset (int): The first byte.
            nbytes (int): The length.
        """
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
        elif hasattr(fcntl, "F_RDAHEAD"):  # macOS
            with suppress(OSError):
                fcntl.fcntl(self.fd, F_RDADVISE, struct.pack("qi", offset, nbytes))

    def stat(self) -> tuple[int, int, int]:
        """The size in bytes, and the times of the last write (mtime) and change (ctime) in ns."""
        return _stamp(os.fstat(self.fd))

    @cached_property
    def direct(self) -> int | None:
        """A descriptor that reads past the page cache; None where that is not possible."""
        if native.direct_loop() is None:
            return None
        try:  # the same file, even if its name is another's by now
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return None
        self._close_direct = weakref.finalize(self, os.close, fd)
        return fd

    @cached_property
    def has_nowait(self) -> bool:
        """Whether a read can take what the page cache holds and not wait for the rest."""
        if not native.NOWAIT:
            return False
        try:
            os.preadv(self.fd, [_byte], 0, native.NOWAIT)
        except BlockingIOError:  # the byte is not in the page cache
            return True
        except OSError:  # the file system cannot say
            return False
        return True

    def is_cached(self, offset: int) -> bool:
        """Whether the page cache holds a byte; False where the system cannot say.

        Args:
            offset (int): The byte.
        """
        try:
            return self.has_nowait and os.preadv(self.fd, [_byte], offset, native.NOWAIT) == 1
        except OSError:
            return False

    def changed(self) -> bool:
        """Whether the file's content may have changed since it was opened.

        A write can put the mtime back, but not the ctime. The ctime also changes when a link to
        the file is made or removed, as when the file is replaced: then its content is the same.
        """
        s = os.fstat(self.fd)
        now, links = _stamp(s), s.st_nlink
        if now[:2] == self.stamp[:2] and links != self._links:
            self.stamp, self._links = now, links
        return now != self.stamp


def _stamp(s):
    return s.st_size, s.st_mtime_ns, s.st_ctime_ns


class Read(NamedTuple):
    """One range of a file and the memory that it is read into.

    Attributes:
        file (File): From ``Reader.open``.
        offset (int): The first byte.
        nbytes (int): The length.
        views (list[memoryview]): Writable bytes, filled one after the other.
        tensor (str): The tensor that is read, for messages.
        expert (int): The expert that it belongs to, for messages.
        parts (Sequence[tuple[int, int]]): Address and bytes of the memory behind the views, if the
            bytes may get there as a copy (``UploadingReader``).
    """

    file: File
    offset: int
    nbytes: int
    views: list[memoryview]
    tensor: str = "bytes"
    expert: int = -1
    parts: Sequence[tuple[int, int]] = ()

    def __str__(self):
        return f"{self.file.path}: {self.tensor}, expert {self.expert}, offset {self.offset}"


class Ranges(Sequence):
    """Reads as a table for native code. Each ``Read`` is made when it is asked for.

    Args:
        table (np.ndarray): ``[n, len(native.COLUMNS)]``, int64.
        nbytes (int): The bytes of all of them.
        files (Collection[File]): The files that they are in.
        reads (Callable): Returns them as a list.
        parts (Sequence): The ``parts`` of each.

    Attributes:
        table, nbytes, files, parts: As above.
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
        """A table of reads.

        Args:
            reads (Sequence[Read]): The reads.
        """
        iovecs = [(native.address_of(view), len(view)) for r in reads for view in r.views]
        iovecs = np.array(iovecs, np.int64)
        rows, at = [], native.address_of(iovecs)
        for r in reads:
            rows.append((r.file.fd, r.offset, at, len(r.views), r.nbytes, 0))
            at += len(r.views) * iovecs[0].nbytes
        files, nbytes = {r.file for r in reads}, sum(r.nbytes for r in reads)
        ranges = cls(np.array(rows, np.int64), nbytes, files, lambda: reads)
        ranges.iovecs = iovecs  # the table has their addresses
        return ranges

    @cached_property
    def _reads(self):
        return self._make()

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        return self._reads[i]

    def between(self, first: int, last: int) -> "Ranges":
        """Some of them, from ``first`` to before ``last``."""
        table = self.table[first:last]
        nbytes = int(table[:, native.NBYTES].sum())
        parts = self.parts[first:last]
        return Ranges(table, nbytes, self.files, lambda: self[first:last], parts)

    def read_direct(self) -> Sequence[Read]:
        """Read them past the page cache.

        Returns:
            Sequence[Read]: Those of which not all bytes were read.
        """
        direct = {file.fd: file.direct for file in self.files}
        if native.direct_loop() is None or None in direct.values():
            return self
        table = self.table.copy()
        table[:, native.FD] = [direct[fd] for fd in table[:, native.FD].tolist()]
        if native.read_direct(table):
            return ()
        return self._left(table)

    def read(self, flags: int = 0, arrived: int | None = None) -> Sequence[Read]:
        """Read them in native code, as ``native.read`` does.

        Args:
            flags (int): For ``native.read``; with ``NOWAIT`` several threads read.
            arrived (int or None): For ``native.read`` without flags.

        Returns:
            Sequence[Read]: Those of which not all bytes were read; all without native code.
        """
        if native.loop() is None:
            return self
        if flags:  # what is copied from the page cache keeps a core busy
            read = native.read_shared(self.table, flags)
        else:
            read = native.read(self.table, flags, arrived)
        return () if read else self._left(self.table)

    def _left(self, table):
        """Those that a table with its ``GOT`` filled in says are not read."""
        left = np.flatnonzero(table[:, native.GOT] != table[:, native.NBYTES])
        table = self.table[left]
        nbytes = int(table[:, native.NBYTES].sum())
        return Ranges(table, nbytes, self.files, lambda: [self[i] for i in left])


def files_of(reads: Sequence[Read]) -> Collection[File]:
    """The files that ranges are in."""
    return reads.files if isinstance(reads, Ranges) else {r.file for r in reads}


def _nbytes(reads):
    return reads.nbytes if isinstance(reads, Ranges) else sum(r.nbytes for r in reads)


def read_ranges(reads: Iterable[Read], arrived: int | None = None, direct: bool = False) -> None:
    """Read ranges one after the other.

    What native code has not read whole is read again here, or raises.

    Args:
        reads (Iterable[Read]): The ranges, in native code if they are ``Ranges``.
        arrived (int or None): The address of a uint32 that native code sets to 1 after the last.
        direct (bool): Past the page cache, where that is possible and they are ``Ranges``.

    Raises:
        ReadError: If a read fails or ends before its last byte.
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
    """The rest of some views once their first bytes are filled."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


def check_unchanged(files: Iterable[File]) -> None:
    """Raise if a file has changed since it was opened.

    Args:
        files (Iterable[File]): Files that have been read.

    Raises:
        ReadError: For the first that has.
    """
    for file in files:
        if file.changed():
            raise ReadError(
                f"{file.path}: changed while it was streamed: expected size, mtime and ctime "
                f"{file.stamp}, got {file.stat()}. Writing to it, chmod, chown and rename "
                "count as changes. Load the model again."
            )


class Reader:
    """Reads ranges of files, several at once.

    Args:
        readers (int): Reads in flight at once.

    Attributes:
        nbytes (int): Bytes read so far.
        reads (int): Ranges read so far.
        read_s (float): Seconds spent reading, summed over the threads.
        closed (bool): Whether ``close`` was called.
        direct (bool): Whether ``start`` reads past the page cache (Linux): for memory that has
            little room for pages beside the slots: they cost time and save few reads.
    """

    def __init__(self, readers: int = 8):
        self.readers = readers
        self.nbytes = self.reads = 0
        self.read_s = 0.0
        self.closed = self.direct = False
        self._pace = 0.0  # seconds a byte in one thread, a running average
        self._inline_pace = 0.0  # the same, of inline reads
        self._small_calls = 0
        self._files = {}
        self._pool = self._background = self._ahead = None
        self._lock = threading.Lock()
        self._no_demand = threading.Event()  # set while no layer waits for reads
        self._no_demand.set()

    def open(self, path: Path) -> File:
        """Open a file, once. A change to it from now on is an error when it is read.

        Args:
            path (Path): The file.

        Returns:
            File: For ``Read``.
        """
        if path not in self._files:
            self._files[path] = File(path)
        return self._files[path]

    @property
    def files(self) -> list[File]:
        """The open files."""
        return list(self._files.values())

    def start(self, reads: Sequence[Read]) -> list[Future]:
        """Begin to read. Call ``finish`` with what this returns before using the views.

        Args:
            reads (Sequence[Read]): The ranges. Those of ``Ranges`` may all be in flight.

        Returns:
            list[Future]: One for each thread that took a share; empty if all has been read.

        Raises:
            ReadError: If a read fails, ends before its last byte, or its file has changed.
        """
        if not reads:
            return []
        self._check_open()
        if self.direct and isinstance(reads, Ranges):
            self._no_demand.clear()
            return [self._submit(self.read_here, part) for part in self._shares(reads)]
        begun = isinstance(reads, Ranges) and self._cached_first(reads)
        if begun:
            reads = self._read_cached(reads)
        if not reads or self._read_inline(reads, lambda: self.read_here(reads), begun):
            return []
        return self._read_in_pool(reads)

    def _check_open(self):
        if self.closed:
            raise ReadError("The model is closed: load it again to go on.")

    def _cached_first(self, ranges):
        """Whether to read first what the page cache holds. One reader has one read in flight."""
        return (
            self.readers > 1
            and native.loop() is not None
            and all(file.has_nowait for file in ranges.files)
            and ranges.nbytes <= CACHED_NBYTES
        )

    def _read_cached(self, ranges):
        """Read what the page cache holds. Return the others, whose reads the system has begun."""
        self._no_demand.clear()
        try:
            begin = time.perf_counter()
            left = ranges.read(native.NOWAIT)
            if len(left) < len(ranges):
                check_unchanged(ranges.files)
                nbytes = ranges.nbytes - _nbytes(left)
                self._count(len(ranges) - len(left), nbytes, begin, ranges.nbytes)
            return left
        finally:
            self._no_demand.set()

    def _read_in_pool(self, reads):
        # A few tasks of equal bytes: each task costs about 20 us, however little it reads.
        share, tasks, size = sum(r.nbytes for r in reads) / self.readers, [[]], 0
        for read in reads:
            if size >= share * len(tasks) and len(tasks) < self.readers:
                tasks.append([])
            tasks[-1].append(read)
            size += read.nbytes
        return [self._submit(self.read_here, task) for task in tasks if task]

    def _shares(self, ranges):
        """Ranges in parts of about equal bytes, one for each reader if they are large enough."""
        ends = np.cumsum(ranges.table[:, native.NBYTES])
        n = min(self.readers, -(-ranges.nbytes // SHARE_NBYTES))
        goals = ends[-1] * np.arange(1, n) / n
        at = [0, *(np.searchsorted(ends, goals) + 1).tolist(), len(ends)]
        return [ranges.between(a, b) for a, b in pairwise(at) if a < b]

    def _submit(self, function, *args):
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.readers, thread_name_prefix="moelab-read")
        return self._pool.submit(function, *args)

    def _read_inline(self, reads, here, begun=False):
        """Call ``here`` to read in this thread if that takes less time. Say whether it was done.

        If the system has begun all of the reads, one thread waits for them as soon as several.
        """
        self._check_open()
        self._no_demand.clear()
        total = _nbytes(reads)
        inline = self.readers == 1 or (
            total <= INLINE_NBYTES and (begun or self._inline_is_fast(total))
        )
        if inline:
            begin = time.perf_counter()
            try:
                here()
            finally:
                self._no_demand.set()
            pace = (time.perf_counter() - begin) / total
            self._inline_pace += INLINE_PACE_WEIGHT * (pace - self._inline_pace)
        return inline

    def _inline_is_fast(self, nbytes):
        self._small_calls += 1
        return nbytes * self._inline_pace < SLOW_S or self._small_calls % RETRY_EVERY == 0

    def finish(self, futures: list[Future]) -> None:
        """Wait for every read that ``start`` began.

        Args:
            futures (list[Future]): From ``start``.

        Raises:
            ReadError: If one of these reads failed. All of these have ended by then.
        """
        if futures:
            wait(futures)
        self._no_demand.set()
        for future in futures:
            future.result()

    def stop(self) -> None:
        """Wait until no thread reads and end the threads. The next read starts new ones."""
        self._no_demand.set()  # prefetch threads wait for this
        pools = self._pool, self._background, self._ahead
        self._pool = self._background = self._ahead = None
        for pool in pools:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def expected_s(self, nbytes: int) -> float:
        """The seconds that a read should take, judged by the last reads.

        Args:
            nbytes (int): Its bytes, divided over all threads.
        """
        return nbytes * self._pace / self.readers

    def read(self, reads: Sequence[Read]) -> None:
        """Read all ranges and return when they have arrived.

        Args:
            reads (Sequence[Read]): The ranges.

        Raises:
            ReadError: As ``finish`` does.
        """
        self.finish(self.start(reads))

    def in_background(self, work: Callable[[], None], threads: int) -> None:
        """Run something on threads other than those of ``start``.

        Args:
            work (Callable): Called once on each thread; it calls ``give_way`` before each read.
            threads (int): How many, at most ``readers``.
        """
        if self._background is None:
            self._background = ThreadPoolExecutor(
                self.readers, thread_name_prefix="moelab-prefetch"
            )
        for _ in range(min(threads, self.readers)):
            self._background.submit(work)

    def read_ahead(self, places: Iterable[list[tuple[File, int, int]]]) -> None:
        """Let the system read experts into the page cache, one after the other; returns at once.

        Args:
            places (Iterable): For each expert, the file, the first byte and the length of its
                ranges.
        """
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1, thread_name_prefix="moelab-ahead")
        self._ahead.submit(self._read_ahead, places, self._ahead)

    def _read_ahead(self, places, pool):
        places = list(places)
        some = places[:: max(1, len(places) // PROBES)]
        if all(file.is_cached(offset) for (file, offset, _), *_ in some):
            return  # and so are the others, nearly always
        for ranges in places:
            for file, offset, nbytes in ranges:
                for at in range(offset, offset + nbytes, AHEAD_NBYTES):
                    if self._ahead is not pool:  # stopped
                        return
                    file.read_ahead(at, min(AHEAD_NBYTES, offset + nbytes - at))

    def give_way(self) -> None:
        """Wait until no layer waits for reads."""
        self._no_demand.wait()

    def read_here(self, reads: Sequence[Read]) -> None:
        """Read ranges one after the other, in the thread that calls.

        Args:
            reads (Sequence[Read]): The ranges.

        Raises:
            ReadError: As ``finish`` does.
        """
        begin = time.perf_counter()
        read_ranges(reads, direct=self.direct)
        check_unchanged(files_of(reads))
        nbytes = _nbytes(reads)
        self._count(len(reads), nbytes, begin, nbytes)

    def _count(self, reads, nbytes, begin, of_nbytes):
        """Count reads that have ended, a part of a call of ``of_nbytes``."""
        took, weight = time.perf_counter() - begin, PACE_WEIGHT * nbytes / max(of_nbytes, 1)
        with self._lock:
            self.nbytes += nbytes
            self.reads += reads
            self.read_s += took
            self._pace += weight * (took / max(nbytes, 1) - self._pace)

    def close(self) -> None:
        """End the threads and close the files. A second call does nothing."""
        self.closed = True
        self.stop()
        for file in self._files.values():
            file.close()
        self._files = {}

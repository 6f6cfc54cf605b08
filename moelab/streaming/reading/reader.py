"""Threads that read ranges of files."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...kernels.code import num_threads
from . import native
from .file import File, ReadError, check_unchanged
from .flight import Flight, Queue
from .ranges import Ranges, Read, files_of, nbytes_of, read_ranges

# Bytes of a call. For up to so many, reading cached pages in the calling thread ("inline") takes
# less time than handing the reads to the pool.
INLINE_NBYTES = 512 * 1024
# Bytes of a call. For up to so many, the calling thread copies what the page cache holds. With two
# cores this beats the pool for 16 MB at least; more cores copy faster than one.
CACHED_NBYTES = 32 * 1024 * 1024 // num_threads()
# Bytes. A read past the page cache of fewer is not worth another thread.
SHARE_NBYTES = 512 * 1024
# Seconds. If the inline reads of a call should take longer than this, judged by the last ones (cold
# pages), use the pool ...
SLOW_S = 3e-4
# ... and retry inline every 16th small call, in case the pages are cached again.
RETRY_EVERY = 16
# Before the system is asked to read many experts ahead, so many of them are looked up in the page
# cache. Looking makes Linux read a page of an expert that is not there.
PROBES = 8
# Bytes of one advice to the system: Linux reads no more than its readahead window for each.
AHEAD_NBYTES = 128 * 1024
# Weight of the newest read in the running averages of seconds a byte. Inline reads adapt faster,
# because few of them are made while the pool reads.
PACE_WEIGHT, INLINE_PACE_WEIGHT = 0.1, 0.5


class Reader:
    """Reads ranges of files with ``readers`` threads, and as many for background work.

    ``direct``: ``Ranges`` are read past the page cache (Linux). Where memory has little room for
    pages beside the slots, pages cost time and save few reads.
    """

    copies_in_graph = False  # whether the GPU copies the bytes read, in its own order

    def __init__(self, readers: int = 8, direct: bool = False):
        self.readers, self.direct = readers, direct
        self.nbytes = self.reads = 0  # bytes and ranges read so far
        # Seconds in reads, summed over the threads. For reads without a thread, the time from the
        # first one's begin to the last one's end, where somebody waited for it.
        self.read_s = 0.0
        self.closed = False
        self._pace = 0.0  # seconds a byte in one thread, a running average
        self._inline_pace = 0.0  # the same, of inline reads
        self._small_calls = 0
        self._files = {}
        self._pool = self._background = self._ahead = None
        self._queue = None  # None: not tried yet. False: this system needs a thread for each read.
        self._lock = threading.Lock()
        self._no_demand = threading.Event()  # set while no layer waits for reads
        self._no_demand.set()

    def open(self, path: Path) -> File:
        """Open a file once. If its content changes from now on, reading it is an error."""
        if path not in self._files:
            self._files[path] = File(path)
        return self._files[path]

    @property
    def files(self) -> list[File]:
        """The open files."""
        return list(self._files.values())

    def start(self, reads: Sequence[Read]) -> list[Future]:
        """Begin to read. Call ``finish`` with the result before using the views."""
        if not reads:
            return []
        self.check_open()
        if self.direct and isinstance(reads, Ranges):
            self._no_demand.clear()
            if flight := self.fly(reads):
                return [flight]
            return self._read_in_pool(reads, SHARE_NBYTES)
        begun = isinstance(reads, Ranges) and self._cached_first(reads)
        if begun:
            reads = self._read_cached(reads)
        if not reads or self._read_inline(reads, lambda: self.read_here(reads), begun):
            return []
        return self._read_in_pool(reads)

    def fly(self, ranges: Ranges) -> Flight | None:
        """Begin to read past the page cache without a thread; None if that is not possible now."""
        if self._queue is None:
            with suppress(OSError):
                self._queue = Queue()
            self._queue = self._queue or False
        table = ranges.direct_table() if self._queue else None
        if table is None or not self._queue.begin(ranges, table):
            return None
        return Flight(self._queue, ranges, table, self._count_flight)

    def check_open(self) -> None:
        """Refuse a closed model, whose files' descriptors may be those of others by now."""
        if self.closed:
            raise ReadError("The model is closed: load it again to go on.")

    def _cached_first(self, ranges):
        """Whether to read first what the page cache holds. (One reader has one read in flight.)"""
        return (
            self.readers > 1
            and native.loop() is not None
            and all(file.has_nowait for file in ranges.files)
            and ranges.nbytes <= CACHED_NBYTES
        )

    def _read_cached(self, ranges):
        """Read what the page cache holds; return the other ranges, which the system has begun."""
        self._no_demand.clear()
        try:
            begin = time.perf_counter()
            left = ranges.read(native.NOWAIT)
            if len(left) < len(ranges):
                check_unchanged(ranges.files)
                nbytes = ranges.nbytes - nbytes_of(left)
                self._count(len(ranges) - len(left), nbytes, begin, ranges.nbytes)
            return left
        finally:
            self._no_demand.set()

    def _read_in_pool(self, reads, least_nbytes=1):
        """Divide the reads into parts of about equal bytes, at most one a reader, and begin them.

        There are fewer parts than readers if they would have fewer than ``least_nbytes`` each.
        """
        is_table = isinstance(reads, Ranges)
        sizes = reads.table[:, native.NBYTES] if is_table else [r.nbytes for r in reads]
        ends = np.cumsum(sizes)
        n = min(self.readers, -(-int(ends[-1]) // least_nbytes))
        goals = ends[-1] * np.arange(1, n) / n
        at = [0, *(np.searchsorted(ends, goals) + 1).tolist(), len(ends)]
        return [self._submit(self.read_here, reads[a:b]) for a, b in pairwise(at) if a < b]

    def _submit(self, function, *args):
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.readers, thread_name_prefix="moelab-read")
        return self._pool.submit(function, *args)

    def _read_inline(self, reads, here, begun=False):
        """Call ``here``, which reads in this thread, if that takes less time; say whether it did.

        If the system has begun all reads, one thread waits for them no longer than many.
        """
        self.check_open()
        self._no_demand.clear()
        total = nbytes_of(reads)
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
        """Wait until every read that ``start`` began has ended; raise if one of them failed."""
        wait([future for future in futures if isinstance(future, Future)])
        self._no_demand.set()
        for future in futures:
            future.result()

    def stop(self) -> None:
        """Wait until nothing is read and end the threads. The next read starts new ones."""
        self._no_demand.set()  # prefetch threads wait for this
        if self._queue:
            self._queue.settle()
        pools = self._pool, self._background, self._ahead
        self._pool = self._background = self._ahead = None
        for pool in pools:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def expected_s(self, nbytes: int) -> float:
        """The seconds that all threads together should take to read, judged by the last reads."""
        return nbytes * self._pace / self.readers

    def read(self, reads: Sequence[Read]) -> None:
        """Read all ranges and return when they have arrived."""
        self.finish(self.start(reads))

    def in_background(self, work: Callable[[], None], threads: int) -> None:
        """Run ``work``, which calls ``give_way`` before each read, on so many other threads."""
        if self._background is None:
            self._background = ThreadPoolExecutor(
                self.readers, thread_name_prefix="moelab-prefetch"
            )
        for _ in range(min(threads, self.readers)):
            self._background.submit(work)

    def read_ahead(self, places: Iterable[list[tuple[File, int, int]]]) -> None:
        """Ask the system to read experts, each a list of (file, offset, bytes), into its cache.

        It returns at once; a thread gives the advice.
        """
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1, thread_name_prefix="moelab-ahead")
        self._ahead.submit(self._read_ahead, places, self._ahead)

    def _read_ahead(self, places, pool):
        places = list(places)
        some = places[:: max(1, len(places) // PROBES)]
        if all(file.is_cached(offset) for (file, offset, _), *_ in some):
            return  # if these are in the page cache, the others nearly always are
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
        """Read ranges one after the other in the calling thread."""
        begin = time.perf_counter()
        read_ranges(reads, direct=self.direct)
        check_unchanged(files_of(reads))
        nbytes = nbytes_of(reads)
        self._count(len(reads), nbytes, begin, nbytes)

    def _count(self, reads, nbytes, begin, of_nbytes):
        """Count reads that have ended; the call that they are a part of reads ``of_nbytes``."""
        took, weight = time.perf_counter() - begin, PACE_WEIGHT * nbytes / max(of_nbytes, 1)
        with self._lock:
            self.nbytes += nbytes
            self.reads += reads
            self.read_s += took
            self._pace += weight * (took / max(nbytes, 1) - self._pace)

    def _count_flight(self, reads, nbytes, took_s):
        with self._lock:
            self.nbytes += nbytes
            self.reads += reads
            if took_s is not None:
                self.read_s += took_s
                self._pace += PACE_WEIGHT * (took_s * self.readers / nbytes - self._pace)

    def close(self) -> None:
        """End the threads and close the files. A second call does nothing."""
        self.closed = True
        self.stop()
        for file in self._files.values():
            file.close()
        self._files = {}

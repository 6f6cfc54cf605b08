"""Threads that read ranges of files."""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock

import numpy as np

from ...interrupts import held, look
from ...kernels.code import num_threads
from ...system import HERE
from . import native
from .file import File, ReadError, check_unchanged
from .flight import Flight, Queue
from .ranges import Ranges, read_ranges

# If a call reads up to this many bytes, the calling thread reads them by itself: handing the reads
# to the pool would take longer.
INLINE_NBYTES = 512 * 1024
# If a call reads up to this many bytes, the calling thread copies those in the page cache. With two
# cores this beats the pool up to 16 MB at least; with more cores the pool copies faster.
CACHED_NBYTES = 32 * 1024 * 1024 // num_threads()
# Bytes of one request to read ahead; Linux reads at most its readahead window per request.
AHEAD_NBYTES = 128 * 1024


class Threads:
    """Reads by threads. A caller waits for all of the reads together."""

    def __init__(self, futures: list[Future]):
        self.futures, self._begin = futures, time.perf_counter()

    def cancel(self) -> bool:
        """Cancel the reads; return whether all were cancelled before they began."""
        return bool(self.futures) and all(future.cancel() for future in self.futures)

    def done(self) -> bool:
        """Whether the reads have ended."""
        return all(future.done() for future in self.futures)

    def result(self) -> float:
        """Wait for all reads, and raise if one failed; return an upper bound of their seconds."""
        wait(self.futures)
        for future in self.futures:
            future.result()
        return time.perf_counter() - self._begin


class Reader:
    """Reads ranges of files: ``readers`` threads for calls, ``readers`` for background work."""

    copies_in_graph = False  # whether an operation of MLX's graph copies the bytes to the GPU

    def __init__(self, readers: int = 8, direct: bool = False):
        self.readers, self.direct = readers, direct
        self.nbytes = self.reads = 0  # bytes and ranges read so far
        # Seconds of reads, summed over threads. A read by no thread counts if a caller waits.
        self.read_s = 0.0
        self.closed = False
        self._files = {}
        self._new_pools()
        self._stops = 0  # how often the threads were stopped
        self._queue = None  # None: not tried yet. False: this system needs a thread for each read.
        self._lock = Lock()
        self._quiet = Event()  # clear while a layer waits for reads by threads
        self._quiet.set()
        self._demanded = []  # a layer's reads by threads; the layer may still wait for them

    def open(self, path: Path) -> File:
        """Open a file once. If its content changes from now on, reading it is an error."""
        if path not in self._files:
            self._files[path] = File(path)
        return self._files[path]

    def start(self, ranges: Ranges, step: int | None = None) -> list[Flight | Threads]:
        """Begin to read; return a group to ``finish`` for each ``step`` ranges (None: one)."""
        self.check_open()
        if flights := self.fly(ranges, step):
            return flights
        self._quiet.clear()
        reads = [Threads(self._read(r)) for r in ranges.divided(step)]
        self._demanded += reads
        return reads

    def start_ahead(self, ranges: Ranges, step: int | None = None) -> list[Flight | Threads]:
        """Begin to read, as ``start`` does, ranges that no layer waits for yet."""
        return self.fly(ranges, step) or [
            Threads([self._background.submit(self._read_behind, r)]) for r in ranges.divided(step)
        ]

    def fly(self, ranges: Ranges, step: int | None = None) -> list[Flight]:
        """Begin to read past the page cache without a thread; return [] if that is impossible."""
        if not self.direct or not len(ranges):
            return []
        if self._queue is None:
            with suppress(OSError):
                self._queue = Queue()
            self._queue = self._queue or False
        table = ranges.direct_table() if self._queue else None
        if table is None or not table[:, native.ROOM].all() or not self._queue.begin(ranges, table):
            return []
        firsts = range(0, len(table), step or len(table))
        parts = [(part, table[i : i + len(part)]) for i, part in zip(firsts, ranges.divided(step))]
        return [Flight(self._queue, *part, self._count) for part in parts]

    def check_open(self) -> None:
        """Raise if the model is closed: its file descriptors may belong to other files by now."""
        look()
        if self.closed:
            raise ReadError("The model is closed: load it again to go on.")

    def _read(self, ranges):
        """Begin to read with threads; read small or cached ranges in this thread."""
        if not self.direct:
            ranges = self._read_cached(ranges)
            if self._is_small(ranges):
                if len(ranges):
                    self.read_here(ranges)
                return []
        # For less than 512 KB a thread pays only if Linux has to fetch pages from the disk.
        is_cold = native.NOWAIT and not self.direct
        parts = self._divided(ranges, least_nbytes=1 if is_cold else 512 * 1024)
        return [self._pool.submit(self.read_here, part) for part in parts]

    def _read_behind(self, ranges):
        """Read in a thread once no layer waits for reads."""
        self._quiet.wait()
        if not self.closed:
            self.read_here(ranges)

    def _is_small(self, ranges):
        """Whether the calling thread reads these ranges by itself."""
        return self.readers == 1 or ranges.nbytes <= INLINE_NBYTES

    def _read_cached(self, ranges):
        """Read what the page cache holds; return the rest, which the system begins to read."""
        # With one reader only one read may be in flight.
        if self.readers == 1 or not native.NOWAIT or ranges.nbytes > CACHED_NBYTES:
            return ranges
        begin = time.perf_counter()
        left = ranges.read(native.NOWAIT)
        if len(left) < len(ranges):
            check_unchanged(ranges.files.values())
            took_s = time.perf_counter() - begin
            self._count(len(ranges) - len(left), ranges.nbytes - left.nbytes, took_s)
        return left

    def _divided(self, ranges, least_nbytes=1):
        """Divide ranges into parts of about equal bytes, at most one for each reader."""
        ends = np.cumsum(ranges.table[:, native.NBYTES])
        n = min(self.readers, -(-int(ends[-1]) // least_nbytes))
        goals = ends[-1] * np.arange(1, n) / n
        at = [0, *(np.searchsorted(ends, goals) + 1).tolist(), len(ends)]
        return [ranges[a:b] for a, b in pairwise(at) if a < b]

    def _new_pools(self):
        """Make a pool for reads and one for background work. Threads begin with the first task."""
        names = "moelab-read", "moelab-prefetch"
        self._pool, self._background = (ThreadPoolExecutor(self.readers, name) for name in names)

    def finish(self, reads: list[Flight | Threads]) -> float:
        """Wait for all reads, and raise if one failed; return the seconds of the slowest read."""
        try:
            return max([read.result() for read in reads], default=0.0)
        finally:
            if self._demanded:
                self._demanded = [r for r in self._demanded if r not in reads and not r.done()]
            if not (self._demanded or self._quiet.is_set()):
                self._quiet.set()

    def stop(self) -> None:
        """Wait until no read runs, and end the threads. The next read starts new threads."""
        self._stops += 1
        self._quiet.set()  # prefetch threads wait for this
        if self._queue:
            self._queue.settle()
        for pool in (self._pool, self._background):  # if interrupted, the next ``stop`` waits
            pool.shutdown(wait=True, cancel_futures=True)
        self._new_pools()

    def read(self, ranges: Ranges) -> None:
        """Read all ranges and return when they have arrived."""
        with held():
            self.finish(self.start(ranges))

    def read_in_turn(self, ranges: Ranges) -> None:
        """Read one range after another, and return when the last one has arrived."""
        self.check_open()
        self.read_here(ranges)

    def read_ahead(self, ranges: Ranges) -> None:
        """Let a thread ask the system to read ranges into the page cache; return immediately."""
        self._background.submit(self._read_ahead, ranges, self._stops)

    def _read_ahead(self, ranges, stops):
        files = ranges.files
        places = ranges.table[:, [native.FD, native.OFFSET, native.NBYTES]].tolist()
        some = places[:: max(1, len(places) // 8)]  # if these are cached, the others mostly are
        if all(files[fd].is_cached(offset) for fd, offset, _ in some):
            return
        for fd, offset, nbytes in places:
            for at in range(offset, offset + nbytes, AHEAD_NBYTES):
                if self._stops != stops:
                    return
                HERE.read_ahead(fd, at, min(AHEAD_NBYTES, offset + nbytes - at))

    def read_here(self, ranges: Ranges, arrived: int | None = None) -> None:
        """Read ranges one after the other in the calling thread (see ``read_ranges``)."""
        begin = time.perf_counter()
        read_ranges(ranges, arrived, self.direct)
        check_unchanged(ranges.files.values())
        self._count(len(ranges), ranges.nbytes, time.perf_counter() - begin)

    def _count(self, reads, nbytes, took_s):
        with self._lock:
            self.reads += reads
            self.nbytes += nbytes
            self.read_s += took_s

    def close(self) -> None:
        """End the threads and close the files. A second call does nothing."""
        self.closed = True
        self.stop()
        for file in self._files.values():
            file.close()
        self._files = {}

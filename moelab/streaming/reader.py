"""Concurrent positioned reads, straight into MLX buffers.

``os.preadv`` takes the buffer of an evaluated MLX array as its destination and releases
the GIL, so a few Python threads are enough to keep an SSD busy.
"""

import fcntl
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

# Below this a read from the page cache takes less time than handing it to a thread.
INLINE_NBYTES = 512 * 1024
# Unless it is not in the page cache: what takes longer in one thread is worth several ...
SLOW_S = 3e-4
# ... and one small call in so many goes without them, to see whether that still holds.
PROBE_EVERY = 16


class ReadError(OSError):
    """A read failed, came back short, or its file changed while it was in use."""


class File:
    """An open file and what it looked like then. It is closed with the last reference to it.

    Args:
        path (Path): The file.
    """

    def __init__(self, path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.fd)  # a second call does nothing
        # Experts are read whole and in no order: what lies behind one is not wanted next, and
        # without read-ahead Linux asks the disk for all of a long read at once.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        elif hasattr(fcntl, "F_RDAHEAD"):  # macOS
            fcntl.fcntl(self.fd, fcntl.F_RDAHEAD, 0)
        self.stamp, self._links = self.stat(), os.fstat(self.fd).st_nlink

    def __str__(self):
        return str(self.path)

    def stat(self):
        """Its size in bytes, when it was last written (mtime) and changed (ctime) in ns, now."""
        s = os.fstat(self.fd)
        return s.st_size, s.st_mtime_ns, s.st_ctime_ns

    def changed(self):
        """Whether it is another file than the one that was opened.

        Only the ctime tells of a write whose mtime has been put back. It also tells of a
        link made or removed, as when the file is replaced: then the content stays.
        """
        now, links = self.stat(), os.fstat(self.fd).st_nlink
        if now[:2] == self.stamp[:2] and links != self._links:
            self.stamp, self._links = now, links
        return now != self.stamp


class Read(NamedTuple):
    """One range of a file and where it goes.

    Attributes:
        file (File): From ``Reader.open``.
        offset (int): Its first byte.
        nbytes (int): Its length.
        views (list[memoryview]): Writable bytes, filled one after the other.
        tensor (str): What is read, for messages.
        expert (int): Of which expert, for messages.
    """

    file: File
    offset: int
    nbytes: int
    views: list
    tensor: str = "bytes"
    expert: int = -1

    def __str__(self):
        return f"{self.file.path}: {self.tensor}, expert {self.expert}, offset {self.offset}"


def _after(views, nbytes):
    """What is left of some views once the first bytes are filled."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


class Reader:
    """Reads ranges of files, several at once.

    Args:
        readers (int): Reads in flight at once.

    Attributes:
        nbytes (int): Bytes read so far.
        reads (int): Ranges read so far.
        read_s (float): Seconds spent reading, summed over the threads.
    """

    def __init__(self, readers=8):
        self.readers = readers
        self.nbytes = self.reads = 0
        self.read_s = 0.0
        self.closed = False
        self._pace = 0.0  # seconds a thread takes for a byte, of late
        self._pace_alone = 0.0  # the same where it was the only one
        self._small_calls = 0
        self._files = {}
        self._pool = self._ahead = None
        self._lock = threading.Lock()
        self._nothing_urgent = threading.Event()
        self._nothing_urgent.set()

    def open(self, path):
        """Open a file, once; any change to it from now on is an error when it is read.

        Returns:
            File: What ``Read`` wants.
        """
        if path not in self._files:
            self._files[path] = File(path)
        return self._files[path]

    def start(self, reads):
        """Begin to read; ``finish`` what this returns before using the views.

        Args:
            reads (list[Read]): The ranges.

        Returns:
            list[Future]: One for each thread that took a share; empty if all is read.

        Raises:
            ReadError: As ``finish`` does.
        """
        if not reads:
            return []
        if self.closed:
            raise ReadError("The model is closed: load it again to go on.")
        self._nothing_urgent.clear()
        total = sum(r.nbytes for r in reads)
        if self.readers == 1 or (total <= INLINE_NBYTES and self._in_passing(total)):
            begin = time.perf_counter()
            try:
                self.read_here(reads)
            finally:
                self._nothing_urgent.set()
            self._pace_alone += 0.5 * ((time.perf_counter() - begin) / total - self._pace_alone)
            return []
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.readers, thread_name_prefix="moelab-read")
        # A few tasks of equal bytes: a task costs about 20 us, whatever it reads.
        share, tasks, size = total / self.readers, [[]], 0
        for read in reads:
            if size >= share * len(tasks) and len(tasks) < self.readers:
                tasks.append([])
            tasks[-1].append(read)
            size += read.nbytes
        return [self._pool.submit(self.read_here, task) for task in tasks]

    def _in_passing(self, nbytes):
        """Whether so few bytes are best read by the thread that asks."""
        self._small_calls += 1
        return nbytes * self._pace_alone < SLOW_S or self._small_calls % PROBE_EVERY == 0

    def finish(self, futures):
        """Wait for every read that ``start`` began.

        Raises:
            ReadError: If one failed; all have ended by then.
        """
        wait(futures)
        self._nothing_urgent.set()
        for future in futures:
            future.result()

    def stop(self):
        """Wait until no thread reads any more and end the threads; the next read starts new ones."""
        self._nothing_urgent.set()  # prefetch threads wait for this
        for pool in (self._pool, self._ahead):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        self._pool = self._ahead = None

    def expected_s(self, nbytes):
        """The seconds that reading so much would take, judged by the last reads."""
        return nbytes * self._pace / self.readers

    def read(self, reads):
        """Read all ranges and return when they have arrived."""
        self.finish(self.start(reads))

    def ahead(self, work, threads):
        """Have something done by threads that do not hold up ``start``'s.

        Args:
            work (Callable): Called once on each thread; it calls ``give_way`` before each read.
            threads (int): How many, at most ``readers``.
        """
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(self.readers, thread_name_prefix="moelab-prefetch")
        for _ in range(min(threads, self.readers)):
            self._ahead.submit(work)

    def give_way(self):
        """Wait until no read of ``start``'s is in flight."""
        self._nothing_urgent.wait()

    def read_here(self, reads):
        """Read ranges one after the other, in the thread that calls.

        Raises:
            ReadError: As ``finish`` does.
        """
        begin = time.perf_counter()
        nbytes = 0
        for r in reads:
            try:
                got = os.preadv(r.file.fd, r.views, r.offset)
                while 0 < got < r.nbytes:  # a signal, or a limit of the kernel
                    more = os.preadv(r.file.fd, _after(r.views, got), r.offset + got)
                    if more == 0:
                        break
                    got += more
            except OSError as e:
                raise ReadError(
                    e.errno,
                    f"{r}: {e.strerror}. Try again: the model goes on from here. "
                    "If it fails again, check the disk.",
                ) from e
            if got != r.nbytes:
                raise ReadError(
                    f"{r}: expected {r.nbytes} bytes, got {got}. The file is shorter than "
                    "when it was loaded: restore it, then load again."
                )
            nbytes += got
        for file in {r.file for r in reads}:
            if file.changed():
                raise ReadError(
                    f"{file.path}: changed while it was streamed: expected size, mtime and ctime "
                    f"{file.stamp}, got {file.stat()}. Writing to it, chmod, chown and rename "
                    "count as changes. Load the model again."
                )
        with self._lock:
            self.nbytes += nbytes
            self.reads += len(reads)
            self.read_s += time.perf_counter() - begin
            self._pace += 0.1 * ((time.perf_counter() - begin) / max(nbytes, 1) - self._pace)

    def close(self):
        """End the threads and close the files. A second call does nothing."""
        self.closed = True
        self.stop()
        for file in self._files.values():
            file.close()
        self._files = {}

"""Concurrent positioned reads, straight into MLX buffers.

``os.preadv`` takes the buffer of an evaluated MLX array as its destination and releases
the GIL, so a few Python threads are enough to keep an SSD busy.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

# Below this a read from the page cache takes less time than handing it to a thread.
INLINE_NBYTES = 512 * 1024


class ReadError(OSError):
    """A read failed, came back short, or its file changed while it was in use."""


class Read(NamedTuple):
    """One range of a file and where it goes.

    Attributes:
        file (Path): The file.
        offset (int): Its first byte.
        view (memoryview): Writable bytes; their length is what to read.
        what (tuple): Tensor and expert, for the error message.
    """

    file: object
    offset: int
    view: memoryview
    what: tuple = ()


class Reader:
    """Reads ranges of files, several at once.

    Args:
        readers (int): Reads in flight at once.

    Attributes:
        nbytes (int): Bytes read so far.
        reads (int): Ranges read so far.
        read_s (float): Seconds spent reading, summed over the threads.
    """

    def __init__(self, readers=4):
        self.readers = readers
        self.nbytes = self.reads = 0
        self.read_s = 0.0
        self._files = {}
        self._pool = None
        self._lock = threading.Lock()

    def open(self, file):
        """Open a file now, so that a later change to it is noticed."""
        if self._files is None:
            raise ReadError("The model is closed: load it again to go on.")
        if file not in self._files:
            fd = os.open(file, os.O_RDONLY)
            self._files[file] = (fd, _stamp(fd))
        return self._files[file]

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
        for file in {r.file for r in reads}:
            self.open(file)
        total = sum(len(r.view) for r in reads)
        if self.readers == 1 or total <= INLINE_NBYTES:
            self._read(reads)
            return []
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.readers, thread_name_prefix="moelab-read")
        # A few tasks of equal bytes: a task costs about 20 us, whatever it reads.
        share, tasks, size = total / self.readers, [[]], 0
        for read in reads:
            if size >= share * len(tasks) and len(tasks) < self.readers:
                tasks.append([])
            tasks[-1].append(read)
            size += len(read.view)
        return [self._pool.submit(self._read, task) for task in tasks]

    def finish(self, futures):
        """Wait for every read that ``start`` began.

        Raises:
            ReadError: If one failed; all have ended by then.
        """
        wait(futures)
        for future in futures:
            future.result()

    def read(self, reads):
        """Read all ranges and return when they have arrived."""
        self.finish(self.start(reads))

    def _read(self, reads):
        begin = time.perf_counter()
        nbytes = 0
        for r in reads:
            fd, _ = self._files[r.file]
            try:
                got = os.preadv(fd, [r.view], r.offset)
                while 0 < got < len(r.view):  # a signal or a limit of the kernel
                    more = os.preadv(fd, [r.view[got:]], r.offset + got)
                    if more == 0:
                        break
                    got += more
            except OSError as e:
                raise ReadError(
                    e.errno, f"{_where(r)}: {e.strerror}. Check the disk and load again"
                ) from e
            if got != len(r.view):
                raise ReadError(
                    f"{_where(r)}: expected {len(r.view)} bytes, got {got}. The file is "
                    "shorter than when it was loaded: restore it and load again."
                )
            nbytes += got
        for file in {r.file for r in reads}:
            fd, stamp = self._files[file]
            if _stamp(fd) != stamp:
                raise ReadError(
                    f"{file}: changed while it was streamed (size and time were {stamp}, "
                    f"are {_stamp(fd)}; first read affected: {_where(reads[0])}). "
                    "Load the model again."
                )
        with self._lock:
            self.nbytes += nbytes
            self.reads += len(reads)
            self.read_s += time.perf_counter() - begin

    def close(self):
        """End the threads and close the files. A second call does nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        for fd, _ in (self._files or {}).values():
            os.close(fd)
        self._files = None


def _stamp(fd):
    s = os.fstat(fd)
    return s.st_size, s.st_mtime_ns


def _where(r):
    tensor, expert = r.what or ("bytes", "-")
    return f"{r.file}: {tensor}, expert {expert}, offset {r.offset}"

"""Open files that notice when their content changes."""

import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from ...checkpoint import sample
from ...system import HERE
from . import native

_byte = bytearray(1)  # for reads that only ask whether a byte is in the page cache


class ReadError(OSError):
    """A read failed, came back short, or its file changed while it was in use."""


class File:
    """An open file, with its size and times at opening; closed when nothing refers to it."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self._close_direct = lambda: None
        self._close = weakref.finalize(self, os.close, self.fd)
        # Each expert is read whole, in no order, so the bytes behind it are not needed next.
        # With readahead off, Linux also requests all of a long read from the disk at once.
        HERE.only_what_is_asked(self.fd)
        self.stamp = self.stat()
        self._sampled = self._sample()

    def __str__(self):
        return str(self.path)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        for close in (self._close, self._close_direct):
            close()

    def stat(self) -> tuple[int, int, int]:
        """The size in bytes, and the times of the last write (mtime) and change (ctime) in ns."""
        s = os.fstat(self.fd)
        return s.st_size, s.st_mtime_ns, s.st_ctime_ns

    @cached_property
    def direct(self) -> int | None:
        """A descriptor that reads past the page cache; None where that is not possible."""
        if native.direct_loop() is None:
            return None
        try:  # this opens the same file, even if another one has its name by now
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return None
        self._close_direct = weakref.finalize(self, os.close, fd)
        return fd

    def is_cached(self, offset: int) -> bool:
        """Whether the page cache holds a byte; False where the system cannot say.

        Linux begins to read the byte's page if it is not there.
        """
        with suppress(OSError):  # the byte is not there, or the file system cannot say
            return bool(native.NOWAIT) and os.preadv(self.fd, [_byte], offset, native.NOWAIT) == 1
        return False

    def changed(self) -> bool:
        """Whether the file was written since it was opened, as far as its size and times tell.

        A program can set the mtime back, but not the ctime. If only the ctime differs, ``sample``
        decides: a write between the sampled blocks is not noticed.
        """
        now = self.stat()
        if now != self.stamp and now[:2] == self.stamp[:2] and self._sample() == self._sampled:
            self.stamp = now
        return now != self.stamp

    def _sample(self):
        """Read samples of the file's bytes, to notice a change."""
        try:
            return sample(self.fd)
        except OSError as e:
            raise ReadError(e.errno, f"{self.path}: {e.strerror}. Check the disk.") from e


def check_unchanged(files: Iterable[File]) -> None:
    """Raise if a file has changed since it was opened."""
    for file in files:
        if file.changed():
            raise ReadError(
                f"{file.path}: changed while it was streamed: expected size, mtime and ctime "
                f"{file.stamp}, got {file.stat()} (if only ctime differs, sampled bytes do, too). "
                "Load the model again."
            )

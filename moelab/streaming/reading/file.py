"""Open files that notice when their content changes."""

import fcntl
import os
import struct
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from . import native

F_RDADVISE = 44  # macOS has it; Python does not name it

_byte = bytearray(1)  # for reads that only ask whether a byte is there


class ReadError(OSError):
    """A read failed, came back short, or its file changed while it was in use."""


class File:
    """An open file, with its size and times when it was opened. The last reference closes it."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self._close_direct = lambda: None
        self._close = weakref.finalize(self, os.close, self.fd)
        # Experts are read whole and in no order, so the bytes behind one are not needed next.
        # Without readahead Linux also requests all of a long read from the disk at once.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        elif hasattr(fcntl, "F_RDAHEAD"):  # macOS
            fcntl.fcntl(self.fd, fcntl.F_RDAHEAD, 0)
        self.stamp, self._links = self.stat(), os.fstat(self.fd).st_nlink

    def __str__(self):
        return str(self.path)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        for close in (self._close, self._close_direct):
            close()

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Ask the system to read a range into the page cache; some systems ignore it."""
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


def check_unchanged(files: Iterable[File]) -> None:
    """Raise if a file has changed since it was opened."""
    for file in files:
        if file.changed():
            raise ReadError(
                f"{file.path}: changed while it was streamed: expected size, mtime and ctime "
                f"{file.stamp}, got {file.stat()}. Writing to it, chmod, chown and rename "
                "count as changes. Load the model again."
            )

"""The operating system's page cache: drop a file from it, and see what is in it."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np


def tensor_files(path: str | Path) -> list[Path]:
    """The file itself, or the ``.safetensors`` files of a model folder."""
    return sorted(Path(path).glob("*.safetensors")) if os.path.isdir(path) else [Path(path)]


def drop_pages(path: str | Path) -> str:
    """Drop a file, or a model folder's tensors, as far as this system allows without root.

    Returns how, for the record of a measurement that calls itself cold. Pages that have not been
    written to the disk yet stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return "F_NOCACHE: nothing new is cached, but what already was may still answer"
    for file in tensor_files(path):
        with open(file, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return "POSIX_FADV_DONTNEED"


def cached_nbytes(path: str | Path) -> int | None:
    """Bytes of a file, or of a model folder's tensors, that are cached; None if it cannot be known.

    ``mincore`` says so: Linux answers truly only to a file's owner and to who may write it.
    """
    mincore, cached = getattr(ctypes.CDLL(None), "mincore", None), 0
    for file in tensor_files(path):
        size, is_own = os.path.getsize(file), os.stat(file).st_uid == os.geteuid()
        if mincore is None or not size or not (is_own or os.access(file, os.W_OK)):
            return None
        with open(file, "rb") as f:
            mapped = np.frombuffer(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        if mincore(*map(ctypes.c_void_p, (mapped.ctypes.data, size, pages.ctypes.data))):
            return None
        cached += min(size, int((pages & 1).sum()) * mmap.PAGESIZE)
    return cached


def disk_read_nbytes() -> int | None:
    """Bytes that the disk has brought for this process so far; None if the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

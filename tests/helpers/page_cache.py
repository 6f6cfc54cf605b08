"""What of a file the operating system's page cache holds."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np


def cached_nbytes(path: Path) -> int | None:
    """Cached bytes of a file, or of a model's tensors; None if ``mincore`` cannot tell us."""
    mincore, cached = getattr(ctypes.CDLL(None), "mincore", None), 0
    for file in path.glob("*.safetensors") if path.is_dir() else [path]:
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

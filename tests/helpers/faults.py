"""Where and how the reads of a test are made."""

import os
from collections.abc import Callable

import pytest

from moelab.streaming.reading import native, reader


def patch_preadv(patch: pytest.MonkeyPatch, preadv: Callable) -> None:
    """Make all reads call a function in place of ``os.preadv``; none goes through native code."""
    patch.setattr(native, "loop", lambda: None)
    patch.setattr(native, "direct_loop", lambda: None)
    patch.setattr(os, "preadv", preadv)


def read_in_threads(patch: pytest.MonkeyPatch) -> None:
    """Let the reader's threads make all reads, also of what the page cache holds."""
    patch.setattr(reader, "INLINE_NBYTES", 0)
    patch.setattr(reader, "CACHED_NBYTES", 0)

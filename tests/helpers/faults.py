"""Where and how the reads of a test are made, and damage to a file that is read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

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


def edit_header(file: Path, edit: Callable) -> None:
    """Let a function change the header of a safetensors file. Its data stay as they are."""
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    edit(header)
    changed = json.dumps(header).encode().ljust(n)
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + n :])

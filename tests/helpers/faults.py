"""Helpers that choose how a test's reads are made, damage a file, or interrupt at any line."""

import contextlib
import dis
import functools
import itertools
import json
import os
import sys
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


class Interrupt:
    """Raises KeyboardInterrupt in this thread before the n-th line of a package that runs."""

    def __init__(self, n, package):
        self.left, self.where, self._folder = n, None, str(Path(package.__file__).parent)

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.startswith(self._folder) else None

    def _line(self, frame, event, arg):
        if event == "line" and not _is_safe(frame.f_code, frame.f_lasti):
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


def at_every_line(package, step, run):
    """Interrupt ``run`` before every ``step``-th line of a package, and yield each such place."""
    for n in itertools.count(1, step):
        with Interrupt(n, package) as interrupt, contextlib.suppress(KeyboardInterrupt):
            run()
        if interrupt.where is None and interrupt.left > 0:
            return
        yield interrupt.where


@functools.cache
def _is_safe(code, at):
    """Whether CPython handles no signal here: a NOP (``try``) or a ``with``'s exit (three None)."""
    following = (i for i in dis.get_instructions(code) if i.offset >= at)
    three = [(i.opname, i.argval) for i in itertools.islice(following, 3)]
    return three[0][0] == "NOP" or three == [("LOAD_CONST", None)] * 3

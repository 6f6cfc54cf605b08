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
from moelab.streaming.residency import layer


def patch_preadv(patch: pytest.MonkeyPatch, preadv: Callable) -> None:
    """Make all reads call ``preadv(os.preadv, fd, views, offset)``; none goes by native code."""
    patch.setattr(native, "loop", lambda: None)
    patch.setattr(native, "direct_loop", lambda: None)
    patch.setattr(os, "preadv", functools.partial(preadv, os.preadv))


def read_in_threads(patch: pytest.MonkeyPatch) -> None:
    """Let the reader's threads make all reads, also reads of what the page cache holds."""
    patch.setattr(reader, "INLINE_NBYTES", 0)
    patch.setattr(reader, "CACHED_NBYTES", 0)


def read_in_parts(patch: pytest.MonkeyPatch) -> None:
    """Let threads read, and let the engine compute experts in parts, like large experts."""
    read_in_threads(patch)
    patch.setattr(layer, "PART_NBYTES", 1)


def edit_header(file: Path, edit: Callable) -> None:
    """Let a function change the header of a safetensors file; the data do not change."""
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    edit(header)
    changed = json.dumps(header).encode().ljust(n)
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + n :])


@contextlib.contextmanager
def interrupt(n, package):
    """Interrupt before the n-th line that runs in a package; yield a list that gets the line."""
    folder, lines, where = str(Path(package.__file__).parent), itertools.count(1), []

    def enter(frame, event, arg):
        return at_line if frame.f_code.co_filename.startswith(folder) else None

    def at_line(frame, event, arg):
        if event == "line" and not _is_safe(frame.f_code, frame.f_lasti) and next(lines) == n:
            where.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            raise KeyboardInterrupt
        return at_line

    sys.settrace(enter)
    try:
        yield where
    finally:
        sys.settrace(None)


def at_every_line(package, step, run):
    """Interrupt ``run`` before every ``step``-th line of a package, and yield each such place."""
    for n in itertools.count(1, step):
        with interrupt(n, package) as where, contextlib.suppress(KeyboardInterrupt):
            run()
        if not where:
            return
        yield where[0]


@functools.cache
def _is_safe(code, at):
    """Whether CPython handles no signal here: a ``try`` begins (NOP), a ``with`` ends (3 None)."""
    following = (i for i in dis.get_instructions(code) if i.offset >= at)
    three = [(i.opname, i.argval) for i in itertools.islice(following, 3)]
    return three[0][0] == "NOP" or three == [("LOAD_CONST", None)] * 3

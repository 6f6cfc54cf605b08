"""Ctrl-C ends a command at once. It ends a model's call in Python only where nothing is half done.

Python handles a signal between any two instructions of the main thread. A KeyboardInterrupt raised
in a destructor is lost. One raised in the standard library's ``Condition`` leaves a lock taken,
and other threads wait for this lock for ever. So moelab raises none in these places. In a command
Ctrl-C calls ``end``. A load, or a call of a streamed model, holds Ctrl-C back (``held``).
"""

import os
import sys
import threading
import time

# The functions of ``signal`` take ten times as long as ``_signal``'s: they make enums of handlers.
from _signal import getsignal, set_wakeup_fd, signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from signal import SIG_DFL, SIGINT, default_int_handler

_undo = []  # what ``end`` calls, from the last to the first
_ends = False  # whether ``end`` was called
_came = False  # whether there was a Ctrl-C that ``held`` holds back


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end the process, unless Ctrl-C is ignored."""
    if getsignal(SIGINT) in (default_int_handler, SIG_DFL):
        signal(SIGINT, end)
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        set_wakeup_fd(writes)
        threading.Thread(target=_watch, args=(reads,), daemon=True).start()


def _watch(signals):
    """End the process if the main thread cannot run ``end``, e.g. while MLX evaluates a prompt."""
    while number := os.read(signals, 1):
        time.sleep(1)
        if number[0] == SIGINT and getsignal(SIGINT) is end and not _ends:
            end()


def end(*_) -> None:
    """Undo what is half written (``undone``), and end the process and its children."""
    global _ends
    _ends, words = True, ["interrupted"]
    try:
        for undo in (_kill_children, *reversed(_undo)):
            with suppress(Exception):
                words.append(undo())
        with suppress(Exception):  # nobody reads stdout, or the signal interrupted a write
            sys.stdout.flush()
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        bars = tqdm.external_write_mode(sys.stderr, nolock=True) if tqdm else nullcontext()
        bars.__enter__()  # leaving the block would draw the bars again
        print(*filter(None, words), sep=": ", file=sys.stderr, flush=True)
    finally:
        os._exit(130)


def _kill_children():
    """Kill the children of this process. A command that starts children has imported psutil."""
    for child in sys.modules["psutil"].Process().children(recursive=True):
        child.kill()


@contextmanager
def undone(undo: Callable[[], str | None], after: bool = True) -> Iterator[None]:
    """If Ctrl-C ends the block, call ``undo`` and print its words; ``after``: call it always."""
    _undo.append(undo)
    try:
        yield
    finally:
        if after:
            undo()
        _undo.remove(undo)


@contextmanager
def written(file: Path) -> Iterator[Path]:
    """Yield a path to write to; a file there is renamed to ``file``, or removed after an error."""
    beside = file.with_name(f"{file.stem}.{os.urandom(8).hex()}{file.suffix}")
    with undone(partial(beside.unlink, missing_ok=True)):
        yield beside
        os.replace(beside, file)


class held:
    """Inside the block a Ctrl-C waits until ``look`` or the block's end raises it.

    Only Python's own handler is replaced, in the main thread: other threads get no exception.
    """

    _holds = False

    def __enter__(self):
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and getsignal(SIGINT) is default_int_handler:
            signal(SIGINT, _note)
            self._holds = True

    def __exit__(self, *_):
        global _came
        if self._holds:
            try:
                signal(SIGINT, default_int_handler)
            finally:  # a second Ctrl-C may be raised before this line
                came, _came = _came, False
            if came:
                raise KeyboardInterrupt


def _note(*_):
    global _came
    _came = True


def look() -> None:
    """Raise the Ctrl-C that is held back in this thread, if there is one."""
    global _came
    if _came and threading.current_thread() is threading.main_thread():
        _came = False
        raise KeyboardInterrupt

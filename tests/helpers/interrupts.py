"""An interrupt at any line of a package."""

import contextlib
import dis
import functools
import itertools
import sys
from pathlib import Path


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
    """Interrupts ``run`` before every ``step``-th line of a package, and says where each time."""
    for n in itertools.count(1, step):
        with Interrupt(n, package) as interrupt, contextlib.suppress(KeyboardInterrupt):
            run()
        if interrupt.where is None and interrupt.left > 0:
            return
        yield interrupt.where


@functools.cache
def _is_safe(code, at):
    """CPython handles no signal at a NOP (``try``), nor before a ``with``'s exit (three None)."""
    following = (i for i in dis.get_instructions(code) if i.offset >= at)
    three = [(i.opname, i.argval) for i in itertools.islice(following, 3)]
    return three[0][0] == "NOP" or three == [("LOAD_CONST", None)] * 3

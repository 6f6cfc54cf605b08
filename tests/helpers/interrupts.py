"""An interrupt at any line of a package."""

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
        if event == "line" and not _leaves_a_with(frame):
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


def _leaves_a_with(frame):
    """CPython handles no signal between the body of a ``with`` and its exit (three times None)."""
    return [i.argval for i in _instructions(frame.f_code, frame.f_lasti)] == [None] * 3


@functools.cache
def _instructions(code, at):
    following = (i for i in dis.get_instructions(code) if i.offset >= at)
    return [i for i in itertools.islice(following, 3) if i.opname == "LOAD_CONST"]

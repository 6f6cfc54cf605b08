"""Ctrl-C during the imports of ``python -m moelab``, which run before its ``main``.

They take most of the first second, and an exception in an import prints a traceback. So Ctrl-C
ends the process at once until ``restore``.
"""

import os
import signal
import sys

_before = signal.getsignal(signal.SIGINT)
_ours = sys.argv[:1] == ["-m"] and _before is signal.default_int_handler


def _quit(*_):
    os.write(2, b"interrupted\n")
    os._exit(130)


def restore() -> None:
    """Make Ctrl-C an exception again, once the package is imported."""
    if _ours:
        signal.signal(signal.SIGINT, _before)


if _ours:
    signal.signal(signal.SIGINT, _quit)

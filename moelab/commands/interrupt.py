"""Ctrl-C while ``python -m moelab`` imports what its command needs.

Imports take most of the first second. An exception in one can be lost or print a traceback.
"""

import os
import signal


def _end(*_):
    os.write(2, b"interrupted\n")
    os._exit(130)


def end_at_once() -> None:
    """Make Ctrl-C end the process without an exception, until ``restore``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def restore() -> None:
    """Make Ctrl-C an exception again, if ``end_at_once`` changed that."""
    # numpy imports this module at its first use, and can lose a Ctrl-C that comes meanwhile.
    import numpy.random  # noqa: F401

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)

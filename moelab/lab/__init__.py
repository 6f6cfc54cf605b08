"""Measure the engine from outside and show what was measured. The engine does not import it.

    lab/experiments/   what is measured: functions that return a table, and the commands
    lab/records.py     the one loop, the one form of a record, what follows from it
    lab/charts.py      charts of a table; lab/claims.py: verdicts; lab/cite.py: numbers in prose
    lab/recording.py   all records again; lab/plots/: the look, sliders, pages
    lab/*.py           instruments: decoding, page cache, memory limit, texts

Experiments import instruments and charts, never the other way.
"""

import os
from types import SimpleNamespace

FAST = os.environ.get("MOELAB_FAST") == "1"


def preset(**sizes) -> SimpleNamespace:
    """The sizes of a notebook, in its one ``parameters`` cell, printed so that each page says them.

    Args:
        **sizes: For each name ``(full, fast)``; the second holds when ``MOELAB_FAST=1``. A value
            that is no pair holds in both.

    Example:
        >>> P = preset(tokens=(128, 16), slots=16)  # P.tokens == 128, P.slots == 16
    """
    chosen = {
        name: v[FAST] if isinstance(v, tuple) and len(v) == 2 else v for name, v in sizes.items()
    }
    print(
        f"preset={'fast (a smoke run, not a measurement)' if FAST else 'full'}:",
        *(f"{k}={v!r}" for k, v in chosen.items()),
    )
    return SimpleNamespace(**chosen)


def advise(model, memory=None, **options):
    """How to stream a model on this machine: ``lab.experiments.advise``, imported when called."""
    from .experiments.advise import advise

    return advise(model, memory, **options)

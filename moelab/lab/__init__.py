"""Measure the engine from outside and show what was measured. The engine does not import the lab.

    lab/experiments/   measurements for a command or several notebooks; others are in notebooks
    lab/records.py     the loop of every measurement, the form and statistics of a record
    lab/charts.py      charts of a table; lab/claims.py: verdicts; lab/plots/: sliders and pages
    lab/*.py           the other files are instruments: decoding, memory limit, texts

Experiments import instruments and charts; instruments and charts import no experiment.
"""

import os
from types import SimpleNamespace

from ..shipped import shipped

FAST = os.environ.get("MOELAB_FAST") == "1"


def preset(**sizes) -> SimpleNamespace:
    """Print and return a notebook's sizes, each ``(full, fast)`` or one value for both.

    With ``MOELAB_FAST=1`` the second value of a pair is taken.
    """
    shipped("results")  # raises if the records that a notebook needs are missing
    chosen = {
        name: v[FAST] if isinstance(v, tuple) and len(v) == 2 else v for name, v in sizes.items()
    }
    print(
        f"preset={'fast (a smoke run, not a measurement)' if FAST else 'full'}:",
        *(f"{k}={v!r}" for k, v in chosen.items()),
    )
    return SimpleNamespace(**chosen)

"""The claims that the lab settles: ``data/claims.json``, and the verdicts that follow from records.

A claim has an ``id``, the ``claim``, its ``source``, the ``notebook`` that shows it, and either
``cannot``, why it cannot be tested here, or ``figures``: for each regime, by name, an expression
over ``records.NAMES`` and its gate, ``least`` or ``most``, to be fixed before the run. It gives
samples, whose median gets the interval of ``records.interval``, or one number, which was counted. A
regime confirms its claim if the whole interval keeps to the gate, refutes it if none of it does,
and is open else. A regime whose record is missing, older than its command, or only a trial, is
open, too. The verdict is what all regimes say.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
from IPython.display import display

from .. import DATA
from . import charts, records

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIRMED, REFUTED, DEPENDS, OPEN, CANNOT = VERDICTS = (
    "confirmed",
    "refuted",
    "depends on",
    "open",
    "cannot be tested here",
)


@dataclass(frozen=True)
class Figure:
    """What was measured of a claim in one regime."""

    regime: str  # where and how it was measured
    median: float  # of the samples, or a count
    low: float  # low to high: the interval of the median
    high: float
    n: int  # samples; 0 for a count
    gate: str  # what the claim asks of the numbers
    says: str  # ``confirmed``, ``refuted`` or ``open``
    missing: str = ""  # what the records lack, if nothing was measured

    def __str__(self):
        if self.missing:
            return f"{self.regime}: not measured yet, {self.missing} ({self.gate})"
        form = ".3g" if abs(self.median) < 1000 else ",.0f"
        told = f"{self.median:{form}}"
        if self.n:
            told += f" [{self.low:{form}}, {self.high:{form}}], n={self.n}"
        return f"{self.regime}: {told} ({self.gate})"


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict."""

    claim: dict[str, Any]  # its entry in the file
    figures: list[Figure]  # one for each regime

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``."""
        said = {figure.says for figure in self.figures}
        if not said:
            return CANNOT
        if {CONFIRMED, REFUTED} <= said:
            return DEPENDS
        return said.pop() if len(said) == 1 else OPEN

    @property
    def because(self) -> str:
        """The figures in words, or why there are none, and what the verdict depends on."""
        if not self.figures:
            return self.claim["cannot"]
        where = [f.regime for f in self.figures if f.says == CONFIRMED]
        depends = f"holds for {'; '.join(where)}. " if self.verdict == DEPENDS else ""
        return depends + ". ".join(map(str, self.figures))


def read(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Read the claims of a file (None: ``data/claims.json``), in order."""
    return json.loads(Path(path or DATA / "claims.json").read_text(encoding="utf-8"))


def judge(claim: dict[str, Any]) -> Judged:
    """Judge a claim by figures that are computed from the records."""
    return Judged(claim, [_figure(claim, *item) for item in claim.get("figures", {}).items()])


def _figure(claim, regime, figure):
    where = f"claim {claim['id']}, {regime}"
    gates = [(sign, figure[sign]) for sign in ("least", "most") if sign in figure]
    if len(gates) != 1:
        raise ValueError(f"{where}: expected least or most, got {', '.join(figure)}")
    ((sign, gate),) = gates
    told = f"at {sign} {gate:g}"
    try:
        found = eval(figure["is"], records.NAMES | {"read": _read})
        counted = np.ndim(found) == 0
        samples = [float(found)] if counted else [float(v) for v in found]
        if not np.isfinite(samples).all():
            raise ValueError("some samples are missing")
        ends = records.interval(samples)
    except (FileNotFoundError, KeyError) as error:  # no record, or one without this variant
        missing = _missing(error)
        return Figure(regime, *[float("nan")] * 3, 0, told, OPEN, missing)
    except Exception as error:
        raise ValueError(f"{where}: {error!r}. Correct it in data/claims.json.") from error
    keeps = [gate <= v if sign == "least" else v <= gate for v in (ends["low"], ends["high"])]
    says = OPEN if keeps[0] != keeps[1] else CONFIRMED if keeps[0] else REFUTED
    n = 0 if counted else len(samples)
    return Figure(regime, float(np.median(samples)), ends["low"], ends["high"], n, told, says)


def scorecard(*ids: str) -> "DataFrame":
    """A table of claims (all without ``ids``) with their verdicts."""
    there = {claim["id"]: claim for claim in read()}
    if wrong := [i for i in ids if i not in there]:
        raise ValueError(f"expected claims of {', '.join(there)}, got {', '.join(wrong)}")
    rows = [
        {"id": i, "claim": j.claim["claim"], "verdict": j.verdict, "because": j.because}
        | {key: j.claim[key] for key in ("source", "notebook")}
        for i in ids or there
        for j in [judge(there[i])]
    ]
    return records.pandas().DataFrame(rows).set_index("id")


def _missing(error):
    """Say in a few words what the records lack."""
    if isinstance(error, KeyError):
        return f"no {str(error).rpartition(', got ')[2].strip(chr(34))} in the record"
    return str(error).partition(":")[0].rpartition("/")[2]


def _read(name):
    """Read a record that may decide a claim."""
    samples = records.read(name)
    if "trial" in samples.attrs:
        raise FileNotFoundError(f"{name} is a trial: {samples.attrs['trial']}")
    return samples


def show(*ids: str) -> None:
    """Show some claims with their verdicts and the figures that they rest on."""
    charts.table(scorecard(*ids)[["claim", "verdict", "because"]])


def browse(card: "DataFrame", *columns: str) -> ipywidgets.VBox:
    """Show a scorecard under choices for some columns; a page without a kernel shows all rows."""
    choices = {
        c: ipywidgets.Dropdown(options=["all", *dict.fromkeys(card[c])], description=c)
        for c in columns
    }
    shown = ipywidgets.HTML(charts.as_html(card))

    def draw(_):
        rows = card
        for column, control in choices.items():
            rows = rows[(rows[column] == control.value) | (control.value == "all")]
        shown.value = charts.as_html(rows)

    for control in choices.values():
        control.observe(draw, names="value")
    view = ipywidgets.VBox([*choices.values(), shown])
    still = {"text/html": charts.as_html(card), "text/plain": card.to_string()}
    display({**view._repr_mimebundle_(), **still}, raw=True)
    return view

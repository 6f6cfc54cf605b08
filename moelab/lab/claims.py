"""Judge claims of others, which ``data/claims.json`` lists; the verdicts follow from records.

A claim has an ``id``, the ``claim``, its ``source`` (in Markdown), the ``notebook`` that shows it,
and ``figures``. ``why`` maps a verdict to its reason. A claim with ``cannot`` (the reason) needs
other hardware, whatever its figures are. ``figures`` maps a regime's name (where and how it was
measured) to an expression over ``NAMES`` and to a gate (``least`` or ``most``), fixed before the
run. The expression gives one count, or samples, whose median gets the interval of
``records.interval``.

A regime confirms its claim if the whole interval keeps to the gate, and refutes it if no part does.
Else the regime is open, also if its record is missing. A gate that asks whether there is an effect
has an equivalence bound: an effect smaller than ``within`` (a ratio) counts as none, so an interval
below this bound refutes, too.

A claim names no condition. So one regime refutes it, and more than half of the regimes have to
confirm it. If some regimes confirm and others refute it, the verdict is ``depends``; else it is
``open``.
"""

import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..shipped import shipped
from . import charts, records

VERDICTS = "confirmed", "refuted", "depends", "open", "not testable here"
CONFIRMED, REFUTED, DEPENDS, OPEN, CANNOT = VERDICTS
# Names that an expression may use, besides ``read``.
NAMES = {"group": records.group, "of": records.values, "ratio": records.paired}


@dataclass(frozen=True)
class Figure:
    """What was measured for a claim in one regime."""

    regime: str  # where and how the figure was measured
    median: float  # the median of the samples, or the count
    low: float  # low to high: the interval of the median
    high: float
    n: int  # samples; 0 for a count
    gate: str  # what the claim asks of the numbers, and the source's number if there is one
    says: str  # ``confirmed``, ``refuted`` or ``open``
    missing: str = ""  # what the records lack, if nothing was measured

    @property
    def measured(self) -> str:
        """The median with its interval and n, or what the records lack."""
        if self.missing:
            return f"not measured yet, {self.missing}"
        form = ".3g" if abs(self.median) < 1000 else ",.0f"
        interval = f" [{self.low:{form}}, {self.high:{form}}], n={self.n}" if self.n else ""
        return f"{self.median:{form}}{interval}"

    def __str__(self):
        return f"{self.regime}: {self.measured} ({self.gate})"


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict."""

    claim: dict[str, Any]  # the claim's entry in the file
    figures: list[Figure]  # one for each regime

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``."""
        if "cannot" in self.claim:
            return CANNOT
        said = [figure.says for figure in self.figures]
        if REFUTED in said:
            return DEPENDS if CONFIRMED in said else REFUTED
        return CONFIRMED if 2 * said.count(CONFIRMED) > len(said) else OPEN

    @property
    def because(self) -> str:
        """The claim's reason, or how many regimes give the verdict, and the first one's figure."""
        verdict = self.verdict
        if found := self.claim.get("cannot") or self.claim.get("why", {}).get(verdict):
            return found
        mine, n = [figure for figure in self.figures if figure.says == verdict], len(self.figures)
        of = f" in {len(mine)} of {n} regimes" if n > 1 else ""
        return f"{verdict.capitalize()}{of}: {mine[0]}."


def read() -> list[dict[str, Any]]:
    """Read the claims of ``data/claims.json``, in order."""
    return json.loads(shipped("claims.json").read_text(encoding="utf-8"))


def judge(*claims: dict[str, Any]) -> list[Judged]:
    """Judge claims by figures that are computed from the records; each record is read once."""
    names = NAMES | {"read": functools.cache(records.read)}
    return [
        Judged(c, [_figure(c, names, *item) for item in c.get("figures", {}).items()])
        for c in claims
    ]


def _figure(claim, names, regime, figure):
    where = f"claim {claim['id']}, {regime}"
    gates = [(sign, figure[sign]) for sign in ("least", "most") if sign in figure]
    if len(gates) != 1:
        raise ValueError(f"{where}: expected least or most, got {', '.join(figure)}")
    ((sign, gate),) = gates
    told = f"{figure['claimed']:g} claimed, " if "claimed" in figure else ""
    told += f"at {sign} {gate:g}"
    try:
        found = eval(figure["is"], names)
        counted = np.ndim(found) == 0
        samples = [float(found)] if counted else [float(v) for v in found]
        if not np.isfinite(samples).all():
            raise ValueError("some samples are missing")
        ends = records.interval(samples)
    except (FileNotFoundError, KeyError) as error:  # no record, or no such variant in it
        return Figure(regime, *[float("nan")] * 3, 0, told, OPEN, _missing(error))
    except Exception as error:
        raise ValueError(f"{where}: {error!r}. Correct it in data/claims.json.") from error
    n, says = 0 if counted else len(samples), _says(sign, gate, figure.get("within"), ends)
    return Figure(regime, float(np.median(samples)), ends["low"], ends["high"], n, told, says)


def _says(sign, gate, within, ends):
    """Judge an interval by its gate, then by the equivalence bound if there is one."""
    low, high = ends["low"], ends["high"]
    if low >= gate if sign == "least" else high <= gate:
        return CONFIRMED
    if high < gate if sign == "least" else low > gate:
        return REFUTED
    if within and (high <= within if sign == "least" else low >= 1 / within):
        return REFUTED
    return OPEN


def _missing(error):
    """Say in a few words what the records lack."""
    if isinstance(error, KeyError):
        return f"no {str(error).rpartition(', got ')[2].strip(chr(34))} in the record"
    return str(error).partition(":")[0].rpartition("/")[2]


def show(*ids: str) -> None:
    """Show the claims with these ids: verdicts, reasons and links to the sources."""
    there = {claim["id"]: claim for claim in read()}
    if wrong := [i for i in ids if i not in there]:
        raise ValueError(f"expected claims of {', '.join(there)}, got {', '.join(wrong)}")
    told = (
        f"- **{j.claim['id']}, {j.verdict}**: {j.claim['claim'].rstrip('.')}. {j.because} "
        f"*Source:* {j.claim['source']}"
        for j in judge(*(there[i] for i in ids))
    )
    charts.say("\n".join(told))

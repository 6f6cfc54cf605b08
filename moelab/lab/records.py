"""Records: measurements that are kept as JSON and read as tables; also published figures.

A recorded run is ``data/results/NAME.json``. A record is a header (kind, command, commit, machine,
load, settings) and flat ``rows``, one for each sample. A file's ``texts`` keep each list of tokens
once, and rows refer to a list by its number. ``interleave`` measures a record, ``read`` reads it as
a table, ``group`` and ``ratios`` summarize a table, ``together`` joins tables, ``save`` writes a
table as a record. Each header in ``data/results`` says what the record shows and how
``data/recipes/records.py`` makes it.
"""

import functools
import importlib
import json
import math
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from tqdm import tqdm

from .. import DATA
from ..checkpoint import read_json
from ..interrupts import written
from ..shipped import shipped
from . import FAST
from .machine import card

if TYPE_CHECKING:
    from pandas import DataFrame, Series

# Figures that others published about their runs, unchecked; in tok/s if the name has no unit.
SOURCES = DATA / "sources.json"
PUBLISHED = read_json(SOURCES) if SOURCES.is_file() else {}  # an installed moelab has no data
COMPUTED = {  # columns that ``table`` adds where rows have what the expression needs
    "token_s": "decode_s / decode_tokens",
    "tok_s": "decode_tokens / decode_s",
    "hit_rate": "hits / (hits + misses)",
    "read_nbytes_per_token": "bytes_read / decode_tokens",
    "tau": "1 + accepted / rounds",
}
DISTURBED = 0.1  # a larger share of the cores used by others, or a larger drift, disturbs a run
WARMUP = 0 if FAST else 1  # rounds that are not kept
DRIFT_S = 30  # in a shorter run no drift is computed: single samples are too noisy
CONFIDENCE = 0.95  # of an interval, if there are enough rounds


def pandas() -> ModuleType:
    """Import pandas; if pandas is missing, the error says what to install."""
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"records need {error.name}, found no such package: pip install 'moelab[lab]'"
        ) from None


def table(record: dict[str, Any]) -> "DataFrame":
    """Turn a record into a table, one row a sample; ``attrs`` is the header. Adds ``COMPUTED``."""
    out, texts = pandas().DataFrame(record["rows"]), record.get("texts")
    if texts:
        out["tokens"] = out.tokens.map(lambda i: texts[int(i)], na_action="ignore")
    out["killed"] = out.killed.eq(True) if "killed" in out else False
    for name, expression in COMPUTED.items():
        with suppress(NameError):  # a column is missing; pandas' own eval would take 10 ms
            out[name] = eval(expression, {}, out)
    out.attrs = {k: v for k, v in record.items() if k not in ("rows", "texts")}
    return out


def computed(rows: Any, source: str = "", machine: Any = "") -> "DataFrame":
    """Make a table of computed or published rows; charts name ``source`` and ``machine``."""
    settings = {"model": source}
    return table({"record": source, "machine": machine, "settings": settings, "rows": rows})


def as_json(samples: "DataFrame") -> dict[str, Any]:
    """Turn a table back into a record, without missing cells and computed columns."""
    rows = samples.drop(columns=[c for c in COMPUTED if c in samples]).convert_dtypes()

    def own(row):
        told = {k: v for k, v in row.items() if isinstance(v, list) or not pandas().isna(v)}
        return told | {"killed": True} if told.pop("killed", False) else told

    header = {k: v for k, v in samples.attrs.items() if k not in ("record", "headers")}
    return header | {"rows": list(map(own, rows.astype(object).to_dict("records")))}


def read(name: str, disturbed: bool = False) -> "DataFrame":
    """Read a record as a table; ``name`` is NAME of ``data/results/NAME.json``, or a path.

    A disturbed or cut-off run is refused unless ``disturbed`` is true.
    """
    path = Path(name) if name.endswith(".json") else shipped("results", f"{name}.json")
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in path.parent.glob("*.json")))
        raise FileNotFoundError(f"{path}: no such record; there are {names or 'none'}")
    found = read_json(path)
    if "rows" not in found or "settings" not in found:
        raise ValueError(
            f"{name}: expected a record with settings and rows, got kind {found.get('kind')!r}."
        )
    spoilt = found.get("partial") or found.get("load", {}).get("disturbed")
    if spoilt and not disturbed:
        what = "was cut off" if found.get("partial") else "was disturbed (see load in its header)"
        raise ValueError(
            f"{name}: expected a whole, undisturbed run, got one that {what}. Measure again, or "
            "read it with disturbed=True."
        )
    return table({"machine": None} | found | {"record": name})


def together(tables: "Mapping[str, DataFrame]", column: str = "source") -> "DataFrame":
    """Join tables into one; ``column`` has their names, ``attrs["headers"]`` their headers."""
    out = pandas().concat([t.assign(**{column: name}) for name, t in tables.items()])
    headers = [h for t in tables.values() for h in t.attrs.get("headers", [t.attrs])]
    out.attrs = headers[0] | {"headers": headers}
    return out.reset_index(drop=True)


def values(samples: "DataFrame", variant: str, column: str) -> "Series":
    """Return a column of one variant, by round, without killed runs."""
    rows = samples[samples.variant == variant]
    if rows.empty or column not in samples:
        there = list(samples) if len(rows) else list(dict.fromkeys(samples.variant))
        raise KeyError(f"expected one of {there}, got {column if len(rows) else variant!r}")
    return rows[~rows.killed].set_index("round")[column]


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Compute the median, the quartiles and the number of some samples."""
    p25, median, p75 = (float(q) for q in np.percentile(samples, (25, 50, 75)))
    return {"median": median, "p25": p25, "p75": p75, "n": len(samples)}


def group(samples: "DataFrame", column: str, by: str | Sequence[str] = "variant") -> "DataFrame":
    """Compute ``median``, ``p25``, ``p75`` and ``n`` of a column's samples, one row a group."""
    groups = samples.dropna(subset=[column]).groupby(by, sort=False)[column]
    return pandas().DataFrame({key: summary(part) for key, part in groups}).T


def paired(samples: "DataFrame", over: str, under: str, column: str | None = None) -> "Series":
    """Divide one variant's column by another variant's, round by round, so that drift cancels.

    A round counts if both variants ran in it. ``column`` is by default ``token_s``, or ``seconds``.
    """
    column = column or _seconds(samples)
    return (values(samples, over, column) / values(samples, under, column)).dropna()


def _seconds(samples):
    return "token_s" if "token_s" in samples else "seconds"


def ratios(samples: "DataFrame", over: str) -> "DataFrame":
    """Compute each variant's speedup relative to ``over``, by round: quartiles and intervals."""
    rows = {}
    for name in dict.fromkeys(samples.variant):
        if len(found := paired(samples, over, name)):
            rows[name] = summary(found) | interval(found)
    return pandas().DataFrame.from_dict(rows, orient="index")


def with_ratio(samples: "DataFrame", over: str, column: str | None = None) -> "DataFrame":
    """Add ``ratio``: variant ``over``'s value in the same round, divided by the row's value."""
    column = column or _seconds(samples)
    ratio = samples["round"].map(values(samples, over, column)) / samples[column]
    return samples.assign(ratio=ratio)


def span(samples: Sequence[float], form: str = ".2f") -> str:
    """Write the median of some samples and its interval: ``"1.50 [1.00, 2.00]"``."""
    ends = interval(samples)
    return f"{m(samples, form)} [{ends['low']:{form}}, {ends['high']:{form}}]"


def apart(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether the intervals of two medians do not overlap."""
    a, b = interval(a), interval(b)
    return b["low"] > a["high"] or b["high"] < a["low"]


def parted(here: "DataFrame", recorded: "DataFrame", *pairs: tuple[str, str]) -> str:
    """Say which ratios of two variants differ here from those of a record; "" if none does."""
    told = []
    for pair in pairs:
        if {*pair} <= {*here.variant}:
            now, then = (paired(samples, *pair) for samples in (here, recorded))
            if apart(now, then):
                told.append(f"{' over '.join(pair)} {span(now)}, recorded {span(then)}")
    of = recorded.attrs["machine"]
    host = f"{of['gpu'] or of['cpu']}, {of['date']}, {recorded.attrs['record']}"
    return f"**Not as recorded** ({host}): a token's time, {'; '.join(told)}." if told else ""


def busy(load: Mapping[str, Any]) -> str:
    """Say what disturbed a run: other programs or machines, a slower host; "" if nothing did."""
    cores, shifted = load.get("cores_of_others", 0), load.get("drift", 0)
    told = [f"others used {cores:.1f} cores"] if cores >= DISTURBED else []
    told += [f"the speed drifted by {shifted:.0%}"] if shifted > DISTURBED else []
    return f"DISTURBED: {', '.join(told)}" if load.get("disturbed") else ""


def m(samples: Sequence[float], form: str = ".2f") -> str:
    """Write the median of some samples."""
    return format(np.median(samples), form)


def q(samples: Sequence[float], form: str = ".2f", scale: float = 1) -> str:
    """Write the median of some samples and their quartiles: ``"1.5 [1.0, 2.0]"``."""
    low, mid, high = np.percentile(samples, (25, 50, 75)) * scale
    return f"{mid:{form}} [{low:{form}}, {high:{form}}]"


def interval(samples: Sequence[float]) -> dict[str, float]:
    """Compute the sign test's interval of the median; each end of the interval is a sample.

    The interval holds for any distribution. ``confidence`` is exact; it is below ``CONFIDENCE`` if
    there are too few samples. (A bootstrap of five samples would claim too much confidence.)
    """
    ordered, n = sorted(samples), len(samples)
    # Entry k: the chance that the median lies outside ``ordered[k]`` to ``ordered[-1 - k]``.
    outside = 2 * np.cumsum([math.comb(n, k) / 2**n for k in range(n)])
    k = max(0, int((outside <= 1 - CONFIDENCE).sum()) - 1)
    return {"low": ordered[k], "high": ordered[-1 - k], "confidence": max(0.0, 1 - outside[k])}


def same_tokens(samples: "DataFrame", baseline: str) -> dict[str, tuple[int, int]]:
    """Count each variant's rounds with the baseline's tokens, and the rounds that both have."""
    theirs, out = values(samples, baseline, "tokens"), {}
    for name in dict.fromkeys(samples.variant):
        mine = values(samples, name, "tokens")
        rounds = mine.index.intersection(theirs.index)
        out[name] = sum(mine[i] == theirs[i] for i in rounds), len(rounds)
    return out


def interleave(
    kind: str,
    variants: Mapping[str, Callable[[int], Any]],
    runs: int,
    settings: dict[str, Any] | None = None,
    warmup: int = WARMUP,
    each_round: Callable[[int], dict[str, Any]] | None = None,
    keep: Callable[["DataFrame"], None] | None = None,
    progress: bool = False,
) -> "DataFrame":
    """Run every variant once a round, in a new random order every round.

    So a change of the machine's speed affects all variants alike. A variant is called with the
    round's number (below 0: the row is not kept). A variant must evaluate its arrays. A variant
    returns the columns of its row, a float for ``seconds``, or None to be timed. ``each_round``
    returns columns for all rows of a round; ``keep`` gets the table after each round. A variant
    whose row says ``killed`` is not run again. ``warmup`` rounds are not kept: one by default, none
    with ``MOELAB_FAST=1``.
    """
    pandas()  # if it is missing, fail before any work
    given = {"runs": runs, "warmup_rounds": warmup}
    running, order = Running(kind, (settings or {}) | given), random.Random(0)
    rows, killed, total = [], set(), (warmup + runs) * len(variants)
    hidden = not progress or (False if "ipykernel" in sys.modules else None)  # None: no terminal
    with tqdm(total=total, desc=kind, unit="run", leave=False, disable=hidden) as bar:
        for i in range(-warmup, runs):
            same = each_round(i) if each_round else {}
            made = {}
            for name in order.sample(list(variants), len(variants)):
                if name not in killed:
                    made[name] = _row(variants[name], i)
                    killed |= {name} if made[name].get("killed") else set()
                bar.update()
            if i >= 0:
                rows += [{"variant": n, "round": i} | made[n] | same for n in variants if n in made]
                if keep:
                    keep(running.table(rows, partial=True))
    return running.table(rows)


def _row(run, i):
    begin = time.perf_counter()
    made = run(i)
    if isinstance(made, dict):
        return made
    return {"seconds": made if isinstance(made, float) else time.perf_counter() - begin}


class Running:
    """A run in progress: the header of its record, and how busy the machine is meanwhile."""

    def __init__(self, kind: str, settings: dict[str, Any] | None = None):
        self.begin, self.others_s = time.monotonic(), _others_s()
        self.header = {
            "kind": kind,
            "command": " ".join(map(_unrooted, sys.orig_argv)),
            **_commit(),
            "machine": card(),
            "settings": settings or {},
        }

    def table(self, rows: list[dict[str, Any]], **more: Any) -> "DataFrame":
        return table(self.record(rows, **more))

    def record(self, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the record of ``rows``, with the machine's load since the run began.

        ``load`` has the cores that other processes and other virtual machines used during the run,
        the ``drift``, and whether these disturbed the run. A run without times never is.
        """
        took_s = max(time.monotonic() - self.begin, 1e-9)
        others = max(0.0, _others_s() - self.others_s) / took_s
        is_timed = any(name.endswith(("seconds", "_s")) for row in rows for name in row)
        shifted = drift(rows)
        much = others > DISTURBED * self.header["machine"]["cores"] or shifted > DISTURBED
        load = {
            "cores_of_others": round(others, 3),
            "drift": round(shifted, 3),
            "disturbed": is_timed and much,
        }
        return self.header | {"load": load} | more | {"rows": rows}


def _unrooted(word):
    """Replace absolute paths in a command's word (also in ``NAME=PATH,PATH``) by file names."""
    parts = re.split("([=,])", word)
    return "".join(os.path.basename(part) if os.path.isabs(part) else part for part in parts)


def _others_s():
    """Return the CPU seconds that other processes and virtual machines took since boot."""
    total = psutil.cpu_times()
    busy = sum(getattr(total, name, 0.0) for name in ("user", "nice", "system", "steal"))
    own = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy - sum(u.ru_utime + u.ru_stime for u in own)


def drift(rows: list[dict[str, Any]]) -> float:
    """Compute how much slower a run's slowest third was than its fastest third: 0.1 is a tenth.

    A variant counts if it has no draft and ran in each round. Each time is divided by the median of
    its variant; a round's time is the median of these quotients. The drift is 0 with fewer than
    five rounds (three, with 15 samples), or with less than ``DRIFT_S`` seconds of samples.
    """
    took = {}  # seconds per token, by variant and then by round
    total = 0  # seconds of all samples
    for row in rows:
        timed = ["decode_s", *(name for name in row if name.endswith(("seconds", "_s")))]
        seconds = next((row[name] for name in timed if isinstance(row.get(name), float)), 0)
        if seconds and not row.get("drafted"):
            of, i = took.setdefault(row.get("variant"), {}), row.get("round")
            total += seconds
            of[i] = of.get(i, 0) + seconds / (row.get("decode_tokens") or 1)
    rounds = sorted({i for of in took.values() for i in of if i is not None})
    whole = [[of[i] for i in rounds] for of in took.values() if of.keys() >= {*rounds}]
    least = 3 if len(rounds) * len(whole) >= 15 else 5
    if len(rounds) < least or not whole or total < DRIFT_S:
        return 0.0
    of_round = np.median([np.divide(times, np.median(times)) for times in whole], axis=0)
    thirds = [np.median(part) for part in np.array_split(of_round, 3)]
    return float(max(thirds) / min(thirds) - 1)


@functools.cache
def _commit():
    """Return the commit, and whether all files but records match it; {} outside a clone."""
    here = Path(__file__)

    def git(words):
        words = ["git", *words.split()]
        return subprocess.check_output(words, cwd=here.parent, stderr=subprocess.DEVNULL, text=True)

    try:
        git(f"ls-files --error-unmatch {here.name}")
        changed = git("status --porcelain -uno -- :/ :!/data/results")
        return {"commit": git("rev-parse HEAD").strip(), "clean": not changed}
    except (OSError, subprocess.CalledProcessError):
        return {}


def save(path: str | Path, samples: "DataFrame") -> None:
    write(path, as_json(samples))


def write(path: str | Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, a line for each row; an old file stays until the new is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, texts = [], {json.dumps(text): i for i, text in enumerate(record.get("texts", []))}
    for row in record["rows"]:
        if isinstance(row.get("tokens"), list):
            row = row | {"tokens": texts.setdefault(json.dumps(row["tokens"]), len(texts))}
        rows.append(json.dumps(row, default=_plain))
    header = {k: v for k, v in record.items() if k not in ("rows", "texts")}
    text = json.dumps(header, indent=1, default=_plain).removesuffix("\n}")
    for name, items in (("texts", texts), ("rows", rows)):
        if items or name == "rows":
            text += f',\n "{name}": [\n  ' + ",\n  ".join(items) + "\n ]"
    with written(path) as beside:
        beside.write_text(text + "\n}\n")


def print_and_save(text: str, samples: "DataFrame", path: str | Path | None = None) -> None:
    """Print a report and what disturbed the run; save the record if a path is given."""
    if told := busy(samples.attrs.get("load", {})):
        text += "\n" * bool(text) + f"{told}; this run is not a record"
    if text:
        print(text)
    if path is not None:
        save(path, samples)


def _plain(value):
    """Convert a value that ``json`` cannot write by itself."""
    return value.item() if isinstance(value, (np.integer, np.floating)) else str(value)

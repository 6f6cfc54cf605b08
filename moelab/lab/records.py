"""Records: what a measurement keeps as JSON, read back as a table, and published figures.

A recorded run is ``data/results/NAME.json``. A record is a header (kind, command, commit, machine,
load, settings) and flat ``rows``, one a sample. ``interleave`` measures one, ``read`` gives it as a
table, ``group`` and ``ratios`` say what follows, ``together`` puts several into one table, ``save``
writes it. A record with ``trial`` in its header is read but decides no claim.
"""

import functools
import importlib
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from tqdm import tqdm

from ..checkpoint import read_json
from ..shipped import shipped
from .machine import card

if TYPE_CHECKING:
    from pandas import DataFrame, Series

# What the sources say of their own runs, not checked by us; tok/s unless the name says otherwise.
PUBLISHED = {
    "PR 26": {
        "source": "SwiftLM PR 26, Qwen3.5-122B-A10B 4-bit, M1 Ultra 64 GB",
        "serial, top-8": 0.58,
        "buffers, top-8": 4.95,
        "buffers, top-6": 5.20,
        "buffers, top-4": 5.91,
        "buffers, top-2": 6.52,
        "resident memory (GB)": 10.6,
        "SSD rate of the original (GB/s)": 0.3,
        "SSD rate possible (GB/s)": 5.0,
        "ms of GPU in a token": 190.0,
    },
    "PR 90": {
        "source": "SwiftLM PR 90, Qwen3.5-122B-A10B 4-bit, top-6, 16 slots, M1 Ultra 64 GB",
        "buffers": 5.12,
        "stacked": 5.92,
        "fused": 5.64,
        "stacked, by its own percentage": 5.12 * 1.046,
        "one dispatch (us)": 30.0,
    },
    "issue 124": {
        "source": "mlx-swift-lm issue 124, M4 Max 96 GB",
        "dense, Python": 70.2,
        "dense, Swift": 52.8,
        "moe, Python": 85.1,
        "moe, Swift": 11.7,
        "dense layers": 36,
        "moe layers": 40,
    },
    "Anemll": {
        "source": "anemll-flash-mlx, Qwen3.5-35B-A3B 4-bit, top-4, M5 Max 128 GB",
        "resident": 94.5,
        "16 slots": 17.1,
        "64 slots": 42.8,
        "128 slots": 47.1,
    },
}


COMPUTED = {  # columns that ``table`` adds where rows have what they follow from
    "token_s": "decode_s / decode_tokens",
    "tok_s": "decode_tokens / decode_s",
    "hit_rate": "hits / (hits + misses + in_pages)",
    "read_nbytes_per_token": "bytes_read / decode_tokens",
    "tau": "1 + accepted / rounds",
}
MISSING = {"killed": False, "in_pages": 0}  # of rows that do not say it
DISTURBED = 0.1  # of the cores, used by other processes
CONFIDENCE = 0.95  # of an interval, where there are rounds enough


def pandas() -> ModuleType:
    """The package pandas.

    Raises:
        ModuleNotFoundError: If it is not installed, with what to install.
    """
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"records need {error.name}, found no such package: pip install 'moelab[lab]'"
        ) from None


def table(record: dict[str, Any]) -> "DataFrame":
    """A record's rows as a table, one row a sample, its header in ``attrs``.

    Args:
        record (dict): A header, and its ``rows``: dicts of columns with their units in their
            names. A column that a row lacks is nan there.

    Returns:
        DataFrame: With the columns of ``COMPUTED`` that follow from the rows.
    """
    out = pandas().DataFrame(record["rows"])
    for name, value in MISSING.items():
        out[name] = out[name].fillna(value).astype(type(value)) if name in out else value
    for name, expression in COMPUTED.items():
        with suppress(pandas().errors.UndefinedVariableError):
            out[name] = out.eval(expression)
    out.attrs = {k: v for k, v in record.items() if k != "rows"}
    return out


def published(source: str, rows: list[dict[str, Any]]) -> "DataFrame":
    """Figures of a source, or what follows from them, as a table; charts name the source alone.

    Args:
        source (str): A key of ``PUBLISHED``.
        rows (list[dict]): As for ``table``.
    """
    settings = {"model": PUBLISHED[source]["source"]}
    return table({"record": source, "machine": "", "settings": settings, "rows": rows})


def as_json(samples: "DataFrame") -> dict[str, Any]:
    """The record of a table: its header and rows, without what ``table`` adds and missing cells."""
    rows = samples.drop(columns=[c for c in COMPUTED if c in samples]).convert_dtypes()

    def own(row):
        isna = pandas().isna
        row = {k: v for k, v in row.items() if isinstance(v, list) or not isna(v)}
        return {k: v for k, v in row.items() if k not in MISSING or v != MISSING[k]}

    header = {k: v for k, v in samples.attrs.items() if k not in ("record", "headers")}
    return header | {"rows": list(map(own, rows.astype(object).to_dict("records")))}


def read(name: str, disturbed: bool = False) -> "DataFrame":
    """A recorded run as a table.

    Args:
        name (str): Of ``data/results/NAME.json``, or the path of another file that ends so.
        disturbed (bool): Whether to take what is no record: a run that other work disturbed, or
            that was cut off. One whose header says ``trial``, and why, is taken.

    Returns:
        DataFrame: As ``table`` gives it, with the name as ``record`` in its header.

    Raises:
        FileNotFoundError: If there is no such record, with the names of those that there are.
        ValueError: If it has no rows, or was disturbed or cut off.
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
    if spoilt and not (disturbed or "trial" in found):
        what = "was cut off" if found.get("partial") else "ran while other work used the processor"
        raise ValueError(
            f"{name}: expected a whole, undisturbed run, got one that {what}. Measure again, or "
            "read it with disturbed=True."
        )
    out = table({"machine": None} | found | {"record": name})
    if "zero_copy" in out:  # a setting that is gone: else computed in the page cache
        out = out[out.zero_copy.eq(False) | out.direct.ne(False)]
        out = out.assign(variant=out.variant.str.replace("/zero_copy=False", ""))
    return out


def together(tables: "Mapping[str, DataFrame]", column: str = "source") -> "DataFrame":
    """Several tables as one, with a column that says which a row comes from.

    Args:
        tables (Mapping): Tables by name.
        column (str): Of the names.

    Returns:
        DataFrame: ``attrs`` are the first one's, and ``headers`` has those of all.
    """
    out = pandas().concat([t.assign(**{column: name}) for name, t in tables.items()])
    headers = [t.attrs for t in tables.values()]
    out.attrs = headers[0] | {"headers": headers}
    return out.reset_index(drop=True)


def values(samples: "DataFrame", variant: str, column: str) -> "Series":
    """A column of one variant, by round. Of a variant that was killed there is nothing.

    Raises:
        KeyError: If there is no such variant or column, with those that there are.
    """
    rows = samples[samples.variant == variant]
    if rows.empty or column not in samples:
        there = list(samples) if len(rows) else list(dict.fromkeys(samples.variant))
        raise KeyError(f"expected one of {there}, got {column if len(rows) else variant!r}")
    return rows[~rows.killed].set_index("round")[column]


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and number of some samples."""
    p25, median, p75 = (float(q) for q in np.percentile(samples, (25, 50, 75)))
    return {"median": median, "p25": p25, "p75": p75, "n": len(samples)}


def group(samples: "DataFrame", column: str, by: str | Sequence[str] = "variant") -> "DataFrame":
    """``median``, ``p25``, ``p75`` and ``n`` of a column's samples, a row for each group."""
    groups = samples.dropna(subset=[column]).groupby(by, sort=False)[column]
    return pandas().DataFrame({key: summary(part) for key, part in groups}).T


def paired(samples: "DataFrame", over: str, under: str, column: str | None = None) -> "Series":
    """A column of one variant over that of another, by round, so that drift cancels.

    Only rounds that both have are there. Default: seconds of a token, or else ``seconds``.
    """
    column = column or _seconds(samples)
    return (values(samples, over, column) / values(samples, under, column)).dropna()


def _seconds(samples):
    return "token_s" if "token_s" in samples else "seconds"


def ratios(samples: "DataFrame", over: str, column: str | None = None) -> "DataFrame":
    """One variant's column over each variant's, by round: quartiles, n and an interval.

    Args:
        samples (DataFrame): Of ``table``.
        over (str): The variant whose column is divided; for seconds, what others are compared
            with.
        column (str): The column. Default: as for ``paired``.

    Returns:
        DataFrame: By variant, without those that were killed: ``median``, ``p25``, ``p75``, ``n``
        and what ``interval`` gives.
    """
    rows = {}
    for name in dict.fromkeys(samples.variant):
        if len(found := paired(samples, over, name, column)):
            rows[name] = summary(found) | interval(found)
    return pandas().DataFrame.from_dict(rows, orient="index")


def with_ratio(samples: "DataFrame", over: str, column: str | None = None) -> "DataFrame":
    """The samples with a column ``ratio``: one variant's column over the row's own, by round.

    For seconds that is the speed over that variant's, to be drawn or grouped as any column.

    Args:
        samples (DataFrame): Of ``table``.
        over (str): The variant whose column is divided.
        column (str): The column. Default: as for ``paired``.
    """
    column = column or _seconds(samples)
    ratio = samples["round"].map(values(samples, over, column)) / samples[column]
    return samples.assign(ratio=ratio)


def interval(samples: Sequence[float]) -> dict[str, float]:
    """An interval of the median: the sign test's, from one of the sorted samples to another.

    It holds for any distribution, and its confidence is exact. A bootstrap of five rounds claims
    too much.

    Returns:
        dict: ``low``, ``high`` and the ``confidence`` that the true median lies between them. It is
        below ``CONFIDENCE`` where even the smallest and the largest sample give less.
    """
    ordered, n = sorted(samples), len(samples)
    outside = 2 * np.cumsum([math.comb(n, k) / 2**n for k in range(n)])  # of k-th and n-k-th
    k = max(0, int((outside <= 1 - CONFIDENCE).sum()) - 1)
    return {"low": ordered[k], "high": ordered[-1 - k], "confidence": max(0.0, 1 - outside[k])}


def same_tokens(samples: "DataFrame", baseline: str) -> dict[str, tuple[int, int]]:
    """In how many rounds each variant decoded the baseline's tokens, and of how many."""
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
    warmup: int = 1,
    seed: int = 0,
    each_round: Callable[[int], dict[str, Any]] | None = None,
    keep: Callable[["DataFrame"], None] | None = None,
    progress: bool = True,
) -> "DataFrame":
    """Run every variant once a round, in a new random order every round.

    A machine that becomes slower or faster then does so for all variants alike.

    Args:
        kind (str): Of the record.
        variants (Mapping): A function by name. It takes the round's number, below 0 in a round
            that is not kept, and returns the columns of its row; a float for ``seconds``; or None
            to be timed. What it computes it must evaluate.
        runs (int): Rounds that are kept.
        settings (dict): Of the run, for the header.
        warmup (int): Rounds before them.
        seed (int): Of the orders.
        each_round (Callable): Called before each round, with its number; gives columns for all of
            its rows.
        keep (Callable): Called with the table after each round, so that a run that is cut off
            keeps what it has.
        progress (bool): Show a bar.

    Returns:
        DataFrame: As ``table`` gives it, with ``variant`` and ``round``. A variant whose row says
        ``killed`` is not run again.
    """
    given = {"runs": runs, "warmup_rounds": warmup, "seed": seed}
    running, order = Running(kind, (settings or {}) | given), random.Random(seed)
    rows, killed, total = [], set(), (warmup + runs) * len(variants)
    with tqdm(total=total, desc=kind, unit="run", leave=False, disable=not progress) as bar:
        for i in range(-warmup, runs):
            same = each_round(i) if each_round else {}
            made = {}
            for name in order.sample(list(variants), len(variants)):
                if name not in killed:
                    made[name] = _row(variants[name], i)
                    killed |= {name} if made[name].get("killed") else set()
                bar.update()
            if i >= 0:
                done = (name for name in variants if name in made)
                rows += [{"variant": n, "round": i} | made[n] | same for n in done]
            if i >= 0 and keep:
                keep(running.table(rows, partial=True))
    return running.table(rows)


def _row(run, i):
    begin = time.perf_counter()
    made = run(i)
    if isinstance(made, dict):
        return made
    return {"seconds": made if isinstance(made, float) else time.perf_counter() - begin}


def timed(call: Callable[[], Any], **columns: Any) -> Callable[[int], dict[str, Any]]:
    """A variant for ``interleave``: a call to time, and columns that say what it is."""
    return lambda i: _row(lambda _: call(), i) | columns


class Running:
    """The header of a run that goes on: what made it, where, and what else the machine did.

    Args:
        kind (str): Of the record.
        settings (dict): Of the run.
        tabled (bool): Whether ``table`` will be called.

    Raises:
        ModuleNotFoundError: If it will, and pandas is not installed.
    """

    def __init__(self, kind: str, settings: dict[str, Any], tabled: bool = True):
        if tabled:
            pandas()  # said before the work, which would be lost
        self.average = list(os.getloadavg())
        self.begin, self.others_s = time.monotonic(), _others_s()
        self.header = {
            "kind": kind,
            "command": _command(),
            **_commit(),
            "machine": card(),
            "settings": settings,
        }

    def table(self, rows: list[dict[str, Any]], **more: Any) -> "DataFrame":
        """``record`` as ``table`` gives it."""
        return table(self.record(rows, **more))

    def record(self, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The samples until now, with the load until now.

        Args:
            rows (list[dict]): The samples.
            **more: Further keys of the header.

        Returns:
            dict: Header and rows. ``load`` in the header has the system's load averages
            before the run, how many cores other processes used on average during it, and whether
            that disturbed the run. Counts are not disturbed, only what has seconds.
        """
        took_s = max(time.monotonic() - self.begin, 1e-9)
        others = max(0.0, (_others_s() - self.others_s) / took_s)
        is_timed = any(name.endswith(("seconds", "_s")) for row in rows for name in row)
        load = {
            "average_before": self.average,
            "cores_of_others": round(others, 3),
            "disturbed": is_timed and others > DISTURBED * self.header["machine"]["cores"],
        }
        return self.header | {"load": load} | more | {"rows": rows}


def _others_s():
    """Seconds of processor time that other processes used since the machine started."""
    total = psutil.cpu_times()
    busy = sum(getattr(total, name, 0.0) for name in ("user", "nice", "system", "steal"))
    own = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy - sum(u.ru_utime + u.ru_stime for u in own)


def _command():
    """The words of this process, files without their folders."""
    return " ".join(Path(w).name if os.path.isabs(w) else w for w in sys.orig_argv)


@functools.cache
def _commit():
    """The commit, and whether all files but records were as in it; nothing outside a repository."""
    here = Path(__file__)
    others = "status --porcelain -uno -- :/ :!/data/results"
    words = ["rev-parse HEAD", others, f"ls-files --error-unmatch {here.name}"]
    try:
        commit, changed, _ = (
            subprocess.run(
                ["git", "-C", here.parent, *w.split()], capture_output=True, text=True, check=True
            ).stdout
            for w in words
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": commit.strip(), "clean": not changed}


def save(path: str | Path, samples: "DataFrame") -> None:
    """Write a record as JSON, a row a line; the old file stays until the new one is whole.

    Args:
        path (str or Path): The file. Its folder is made.
        samples (DataFrame): As ``table`` gives it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, record = path.with_name(path.name + ".partial"), as_json(samples)
    rows = ",\n  ".join(json.dumps(row, default=_plain) for row in record.pop("rows"))
    text = json.dumps(record, indent=1, default=_plain)
    partial.write_text(text.removesuffix("\n}") + f',\n "rows": [\n  {rows}\n ]\n}}\n')
    os.replace(partial, path)


def print_and_save(text: str, samples: "DataFrame", path: str | Path | None = None) -> None:
    """Print a record's report and whether other work disturbed the run, and save the record.

    Args:
        text (str): The report; nothing if it is empty.
        samples (DataFrame): As for ``save``.
        path (str or Path, optional): The file. Default: none is written.
    """
    load = samples.attrs.get("load", {})
    if load.get("disturbed"):
        cores = f"other processes used {load['cores_of_others']:.1f} cores"
        text += "\n" * bool(text) + f"DISTURBED: {cores}; this run is not a record"
    if text:
        print(text)
    if path is not None:
        save(path, samples)


def check_writable(path: str | Path) -> None:
    """Whether ``save`` could write a file; none is made.

    Raises:
        ValueError: If not.
    """
    path = Path(path)
    parent = next((p for p in path.absolute().parents if os.path.lexists(p)), Path("/"))
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is there and is no plain file")
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ValueError(
            f"json {str(path)!r}: expected a file that can be written, "
            f"but {error.strerror or error}. Name another."
        ) from error


def _plain(value):
    """What ``json`` cannot write by itself."""
    return value.item() if isinstance(value, (np.integer, np.floating)) else str(value)


NAMES = {  # what expressions in documents and claims may use
    **{name: globals()[name] for name in ("read", "group", "ratios", "same_tokens")},
    **{"of": values, "ratio": paired, "PUBLISHED": PUBLISHED, "np": np},
}

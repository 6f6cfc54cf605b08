"""Make the records again, and the page that shows them, from one list: ``data/records.toml``.

    python -m moelab.lab records                     lists the parts
    python -m moelab.lab records engine drafts       measures two of them
    python -m moelab.lab records cpu_bench_35b       measures one record
    python -m moelab.lab records page                writes data/results/README.md

A record of the list has its ``part`` (which takes half an hour at most), its ``command`` and
``what`` it holds; on the page it shows the columns in ``shows``, grouped ``by`` columns. Cells of
a ``notebook`` measure others: ``records.save(PATH, here)`` keeps one. The checkpoints that
commands name are made once, under ``build/records``.
"""

import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import DATA
from . import records
from .machine import card, card_line

if TYPE_CHECKING:
    from pandas import DataFrame

LIST, RESULTS = DATA / "records.toml", DATA / "results"
PAGE = RESULTS / "README.md"
WORK = DATA.parent / "build" / "records"
DOCUMENTS = ("README.md", "data/claims.json", "notebooks/*.ipynb")
SHOWN = {  # columns that a record shows on its page, if it has them and names no others
    "tok_s": "tok/s",
    "hit_rate": "hits",
    "prefill_s": "prompt (s)",
    "seconds": "seconds",
}


def listed() -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The commands that make checkpoints, and the entries of records, both by name."""
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return entries.pop("checkpoints"), entries


class _Places(dict):
    """The folder of each checkpoint, which is made if it is missing."""

    def __init__(self, commands: dict[str, str]):
        super().__init__()
        self.commands = commands

    def __missing__(self, name):
        command = self.commands[name]
        if not command.startswith(("synthesize", "repack")):
            return str(DATA / command)
        path = WORK / name
        if not path.is_dir():
            words = command.format_map(self)  # first makes the checkpoints that this one is made of
            _run(["-m", "moelab", *words.split(), str(path), "--quiet"])
        return str(path)


def _python(command):
    """The words behind ``python``: of a lab's script, of a recipe, or of a command."""
    first, *rest = command.split()
    if first == "recipe":
        return [f"data/recipes/{rest[0]}.py", *rest[1:]]
    return ["-m", "moelab.lab", *rest] if first == "lab" else ["-m", "moelab", first, *rest]


def _how(entry):
    """By which command, or in which notebook, a record is measured."""
    if "notebook" in entry:
        return f"in a cell of notebook {entry['notebook']}, see records.save"
    if "command" not in entry:
        return "by an earlier version, which tried ways that the engine does not have"
    return f"by `python {' '.join(_python(entry['command']))}`"


def _run(words):
    """Run one of our commands; a failure is an ``OSError``, unless it found other tokens."""
    done = subprocess.run([sys.executable, *words], cwd=DATA.parent)
    if done.returncode not in (0, 3):
        raise OSError(f"{' '.join(words)}: exit status {done.returncode}")


def main(*names: str) -> int:
    """Measure parts or records, and replace the files of those that nothing disturbed.

    Without names it lists them; ``page`` writes the page. The status is 1 if a run was disturbed.
    """
    checkpoints, entries = listed()
    parts = {entry["part"] for entry in entries.values()}
    if names == ("page",):
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if wrong := [name for name in names if name not in parts | entries.keys()]:
        known = ", ".join([*sorted(parts), *entries])
        raise ValueError(f"records: expected some of {known}; got {', '.join(wrong)}")
    if not names:
        for part in sorted(parts):
            mine = [name for name, entry in entries.items() if entry["part"] == part]
            print(f"{part}: {', '.join(mine)}")
        return 0
    asked = {n: e for n, e in entries.items() if {n, e["part"]}.intersection(names)}
    for name in [name for name, entry in asked.items() if "command" not in entry]:
        print(f"{name}: measured {_how(asked.pop(name))}")
    own = "cuda" if card()["backend"] == "CUDA" else "cpu"
    if others := [name for name in asked if not name.startswith(f"{own}_")]:
        raise ValueError(
            f"records: expected records of this machine, whose names begin with {own}_, got "
            f"{', '.join(others)}. Run them where MLX has that device."
        )
    places, disturbed = _Places(checkpoints), []
    for name, entry in asked.items():
        new, begin = WORK / f"{name}.json", time.monotonic()
        places["out"] = new
        _run(_python(entry["command"].format_map(places)))
        took = f"{(time.monotonic() - begin) / 60:.1f} min"
        try:
            records.read(str(new))
        except ValueError as error:
            disturbed.append(name)
            print(f"{name}: {took}; NOT kept: {error}", file=sys.stderr)
            continue
        kept, before = RESULTS / new.name, WORK / f"{name}.before.json"
        had = kept.is_file()
        if had:
            os.replace(kept, before)
        os.replace(new, kept)  # kept, whatever the old record says
        print(f"{name}: {took}", *(changes(before, kept, entry) if had else []), sep="\n  ")
    return 1 if disturbed else 0


def changes(before: Path, after: Path, entry: dict[str, Any]) -> list[str]:
    """Lines on medians whose intervals lie apart in two records, then how many of all do.

    The record ``before`` may be disturbed or a trial.
    """
    found, both = [], 0
    try:
        old, new = (_groups(records.read(str(f), disturbed=True), entry) for f in (before, after))
    except (ValueError, LookupError, NameError):  # pandas raises NameError for a missing column
        return ["the record before it has another form: not compared"]
    for key in [k for k in new if k in old]:
        for label in [c for c in new[key] if c in old[key]]:
            samples = [shown[key][label].dropna() for shown in (old, new)]
            if all(map(len, samples)):
                was, now = map(records.interval, samples)
                both += 1
                if now["low"] > was["high"] or now["high"] < was["low"]:
                    cells = " -> ".join(map(_cell, samples))
                    found.append(f"{', '.join(map(str, key))}: {label} {cells}")
    return [*found, f"changed by more than its interval: {len(found)} of {both}"]


def provenance() -> "DataFrame":
    """A table of all records: date, commit, whether the tree was clean, load, trial or not."""
    rows = []
    for file in sorted(RESULTS.glob("*.json")):
        header = records.read(str(file)).attrs
        load = header.get("load", {}).get("cores_of_others", "not kept")
        commit = header.get("commit", "not kept")[:12]
        clean = header.get("clean", "not kept")
        trial = "trial" if "trial" in header else ""
        rows.append((file.stem, header["machine"]["date"], commit, clean, load, trial))
    columns = ["record", "date", "commit", "clean", "cores of others", ""]
    return records.pandas().DataFrame(rows, columns=columns).set_index("record")


def page() -> str:
    """The page of records, each with its provenance, its samples' medians and who quotes it."""
    checkpoints, entries = listed()
    texts = {p.name: p.read_text() for d in DOCUMENTS for p in sorted(DATA.parent.glob(d))}
    parts = [
        INTRODUCTION,
        *(f"- `{name}`: `{command}`" for name, command in checkpoints.items()),
        "",
    ]
    for name, entry in entries.items():
        file = RESULTS / f"{name}.json"
        if not file.is_file():
            continue
        samples = records.read(str(file))
        quoted = [doc for doc, text in texts.items() if re.search(rf"\b{name}\b", text)]
        parts += [
            f"## {name}",
            "",
            f"{entry['what']} {_provenance(samples)} Quoted in: {', '.join(quoted) or 'nothing'}.",
            "",
            f"Measured {_how(entry)}",
            "",
            *_table(samples, entry),
            "",
        ]
    return "\n".join(parts)


INTRODUCTION = """# The records

`make numbers` writes this page from `data/records.toml` and the records. `make records PART=...`
measures a part again. A record is a header (command, commit, machine, load, settings) and `rows`,
one for each sample: `moelab.lab.records.read(NAME)` gives it as a pandas table. The tables below
have medians [quartiles] of n samples.

In commands `{out}` is the file of the record, and other words in braces are checkpoints:
"""


IN_PAGES = "of an engine that computed with what the page cache held, which moelab no longer does"


def _provenance(samples):
    header = samples.attrs
    load = header.get("load", {}).get("cores_of_others")
    told = [card_line(header["machine"])]
    told += [f"commit {header['commit'][:12]}"] if "commit" in header else ["commit not kept"]
    told += [] if "command" in header else ["made by an earlier command"]
    told += [f"a trial: {header['trial']}"] if "trial" in header else []
    told += [header["note"].rstrip(".")] if "note" in header else []
    told += [IN_PAGES] if samples.in_pages.any() else []
    told += [] if load is None else [f"other processes used {load:.2f} cores"]
    return f"{'; '.join(told)}."


def _groups(samples, entry):
    """The tables that a record shows, one for each group, with a column for each measure."""
    alive = samples[~samples.killed]
    shows = entry.get("shows") or {c: label for c, label in SHOWN.items() if c in samples}
    columns = {label: alive.eval(c) for c, label in shows.items()}
    shown = records.pandas().DataFrame(columns, index=alive.index)
    by = entry.get("by", ["variant"])
    return {k: shown.loc[g.index] for k, g in alive.groupby(by, sort=False, dropna=False)}


def _table(samples, entry):
    """A table as lines of Markdown: a row for each group, a column for each measure."""
    groups, by = _groups(samples, entry), entry.get("by", ["variant"])
    names = [*by, "n", *(next(iter(groups.values())) if groups else [])]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for key, shown in groups.items():
        cells = [_cell(shown[label].dropna()) for label in shown]
        lines.append("| " + " | ".join([*map(str, key), str(len(shown)), *cells]) + " |")
    dead = dict.fromkeys(samples[samples.killed].variant)
    return lines + [f"Killed for its memory: {', '.join(dead)}."] * bool(dead)


def _cell(values):
    if values.empty:
        return "-"
    one, *more = values.astype(float).unique()
    return records.q(values, ".3g") if more else f"{one:.3g}"

"""Measure the records of data/results again, in parts of half an hour at most on two quiet cores.

    python data/recipes/records.py                   lists the parts, and which records are old
    python data/recipes/records.py ladder prompts    measures two parts
    python data/recipes/records.py cpu_ladder_35b    measures one record
    python data/recipes/records.py old               measures old records; after a stop, the rest

A record is old if ``moelab.ENGINE`` was raised since, or if its host's speed drifted while it was
measured. A record of MLX alone has ``engine: null``.

The header of a record says ``what`` it shows, its ``part``, and what makes it. ``make`` is a
command (``{out}`` is the file, other words in braces are checkpoints, made once under
build/records). ``notebook`` names a notebook with a cell that measures the record: save it in a
cell with ``records.save("build/records/NAME.json", table)``, then give this script the record's
name. A record with neither word was made by an earlier version. To add a record, write a file that
has these words, ``"settings": {}`` and ``"rows": []``.
"""

import os
import subprocess
import sys
import time

import moelab
from moelab import DATA
from moelab.checkpoint import read_json
from moelab.lab import records
from moelab.lab.machine import card, engine_of

RESULTS, WORK = DATA / "results", DATA.parent / "build" / "records"
WORDS = ("what", "part", "make", "notebook")  # a new record keeps these words of its header
CHECKPOINTS = {
    "tiny": "models/tiny-moe",
    "dflash": "models/tiny-dflash",
    "mtp": "models/tiny-mtp",
    "code": "traces/code.npz",
    "tiny_packed": "repack {tiny}",
    "q35": "synthesize --like qwen3.5-35b-a3b --layers 4",
    "q35_packed": "repack {q35}",
    "q35_routed": "synthesize --like qwen3.5-35b-a3b --layers 4 --routing {code}",
    "q35_full": "synthesize --like qwen3.5-35b-a3b --vocab 248320 --routing {code}",
    "q35_routed_packed": "repack {q35_routed}",
    "q35_full_packed": "repack {q35_full}",
}
SETTINGS = ("shape", "what", "where", "side", "model", "misses")  # differ in a round's rows
MEASURED = ("_s", "seconds", "hit_rate", "tau", "bits")  # columns with these endings are compared


class Places(dict):
    """The file or folder of each checkpoint, which is made if it is missing."""

    def __missing__(self, name):
        command, path = CHECKPOINTS[name], WORK / name
        if not command.startswith(("synthesize", "repack")):
            return str(DATA / command)
        if not path.is_dir():
            run(f"python -m moelab {command.format_map(self)} {path} --quiet")
        return str(path)


def run(command):
    """Run a record's command; raise OSError if it fails, but not if only tokens differ."""
    done = subprocess.run([sys.executable, *command.split()[1:]], cwd=DATA.parent)
    if done.returncode not in (0, 3):
        raise OSError(f"{command}: exit status {done.returncode}")


def measured(name, header):
    """Return the file of a new record, measured now or in a notebook; None if there is none."""
    new = WORK / f"{name}.json"
    if "make" in header:
        run(header["make"].format_map(Places(out=new)))
    elif not new.is_file():
        book = header.get("notebook")
        how = (
            f"save what notebook {book} measures as {new}" if book else "nothing makes it any more"
        )
        return print(f"{name}: {how}")
    return new


def changes(old, new):
    """Return a line for each figure whose intervals in two records do not meet, and a count."""
    found, both, was = [], 0, groups(old)
    for key, samples in groups(new).items():
        if key in was:
            both += 1
            if records.apart(was[key], samples):
                cells = " -> ".join(records.q(s, ".3g") for s in (was[key], samples))
                found.append(f"{', '.join(map(str, key))}: {cells}")
    return [*found, f"changed by more than its interval: {len(found)} of {both}"]


def old(header):
    """Return why a record is old; an empty text if it is not old."""
    engine, drift = engine_of(header.get("machine", {})), records.drift(header["rows"])
    told = [f"engine {engine}"] if engine < moelab.ENGINE else []
    return ", ".join([*told, f"drift {drift:.0%}"] if drift > records.DISTURBED else told)


def groups(samples):
    """Return the samples of each measured column, by variant and settings."""
    alive, by = samples[~samples.killed], ["variant"]
    if "round" not in alive or alive.duplicated(["variant", "round"]).any():
        by += [c for c in SETTINGS if c in alive]
    elif "prompt_tokens" in alive and alive.prompt_tokens.nunique() <= 3:  # the requested lengths
        by += ["prompt_tokens"]
    names = [c for c in alive.select_dtypes("number") if c.endswith(MEASURED)]
    parts = alive.groupby(by, sort=False, dropna=False)
    found = {(*key, c): part[c].dropna() for key, part in parts for c in names}
    return {key: part for key, part in found.items() if len(part)}


def main(*names):
    """Measure parts or records; if a run is disturbed, drop it and exit with status 1."""
    headers = {p.stem: read_json(p) for p in sorted(RESULTS.glob("*.json"))}
    parts = {}
    for name, header in headers.items():
        parts.setdefault(header["part"], []).append(name)
    own = "cuda_" if card()["backend"] == "CUDA" else "cpu_"
    why = {name: old(header) for name, header in headers.items()}
    parts["old"] = [name for name in headers if why[name] and name.startswith(own)]
    if wrong := [name for name in names if name not in parts and name not in headers]:
        known = ", ".join(sorted(parts))
        raise SystemExit(f"records: expected {known} or records' names; got {', '.join(wrong)}")
    asked = [n for name in names for n in parts.get(name, [name])]
    if others := [name for name in asked if not name.startswith(own)]:
        raise SystemExit(f"records: this machine makes records {own}*, got {', '.join(others)}")
    if not names:
        del parts["old"]
        told = {name: f"{name} (old: {said})" if said else name for name, said in why.items()}
        print(
            *(f"{part}: {', '.join(map(told.get, parts[part]))}" for part in sorted(parts)),
            sep="\n",
        )
    status = 0
    for name in dict.fromkeys(asked):
        begin = time.monotonic()
        if not (new := measured(name, headers[name])):
            continue
        try:
            made = records.read(str(new))
        except ValueError as error:
            print(f"{name}: NOT kept: {error}", file=sys.stderr)
            status = 1
            continue
        words = {word: headers[name][word] for word in WORDS if word in headers[name]}
        records.write(RESULTS / f"{name}.json", words | read_json(new))
        os.remove(new)
        said = changes(records.table(headers[name]), made) if headers[name]["rows"] else []
        print(f"{name}: {(time.monotonic() - begin) / 60:.1f} min", *said, sep="\n  ")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

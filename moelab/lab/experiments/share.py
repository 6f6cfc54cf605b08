"""``python -m moelab share``: one small file of how fast this machine decodes a model.

Settings are fixed, so that files of different machines compare. ``data/community`` has those that
people sent, ``problems`` says what is wrong with one, and ``page`` ranks them.

python -m moelab.lab community OUT.md FILE.json ...
"""

import argparse
import base64
import hashlib
import html
import json
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ... import DATA, StreamConfig, load, record
from ...checkpoint import describe, read_json, shorten, temporary_folder
from ...commands.argument_types import not_empty
from ...commands.arguments import add_model
from ...replay.sizes import ModelSizes
from ...streaming.trace import Trace
from .. import records
from ..decode import decode, encode
from ..models import folder
from ..texts import PROMPTS
from . import bench

RUNS, TOKENS, WARMUP = 7, 32, 32  # rounds, and in each the tokens that are timed and those before
# The most that quartiles may lie apart, over the median, and that one sample may be off.
MAX_SPREAD, MAX_OFF = 0.2, 2.0
SAME_MEMORY = 0.15  # machines are alike if their memories differ by less than this share
NUMBER = (int, float)
COUNTED = ("decode_tokens", "hits", "misses", "bytes_read", "held_nbytes")  # columns of a row
LIKE = {  # the fields that a file must have, with an example of each
    "kind": str,
    "machine": {
        **{"cpu": str, "gpu": (str, type(None)), "cores": int, "memory_nbytes": NUMBER},
        **{"moelab": str, "date": str},
    },
    "load": {"disturbed": bool, "cores_of_others": NUMBER},
    "settings": {"model": str},
    "sizes": dict.fromkeys(("L", "E", "K", "expert_nbytes"), NUMBER),
    "rows": [{"decode_s": NUMBER, **dict.fromkeys(COUNTED, NUMBER)}],
    "trace": str,
    "digest": str,
}


def share(model: str | Path, out: str | Path | None = None) -> Path:
    """Measure a model with fixed settings and write the file (None: named by model and machine)."""
    made = measured(folder(model))
    if wrong := problems(made):
        raise ValueError(f"share: nothing was written. {' '.join(wrong)}")
    machine, name = made["machine"], made["settings"]["model"]
    out = Path(out or f"{name}_{machine['cores']}_cores_{machine['date']}.json")
    out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return out


def measured(path: Path) -> dict[str, Any]:
    """Measure a file's content, without checking it."""
    given = {"tokens": TOKENS, "runs": RUNS, "warmup": WARMUP, "prompts": PROMPTS}
    samples = bench.measure(path, {"fused": StreamConfig()}, **given)
    made = records.as_json(samples) | {"kind": "share", "sizes": asdict(ModelSizes.of(path))}
    model, tokenizer = load(path)
    with model, record(model) as trace:
        decode(model, encode(tokenizer, PROMPTS[0]), TOKENS, warmup=WARMUP)
    with temporary_folder() as work:
        trace.save(file := work / "trace.npz")
        made["trace"] = base64.b64encode(file.read_bytes()).decode()
    made = json.loads(json.dumps(made))  # as JSON will give it back
    return made | {"digest": digest(made)}


def digest(made: dict[str, Any]) -> str:
    """The digest of a file's content (without its own ``digest``), to notice an edit by hand."""
    content = {name: value for name, value in made.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def problems(made: dict[str, Any]) -> list[str]:
    """Sentences that say what is wrong with a file's content; none if it can be taken."""
    sizes, rows, load, out = made["sizes"], made["rows"], made["load"], []
    if made["digest"] != digest(made):
        out.append("It was edited after it was written: its digest is another. Send it as it was.")
    if load["disturbed"]:
        cores = load["cores_of_others"]
        out.append(f"Other programs used {cores:.1f} cores: close them and measure again.")
    if len(rows) != RUNS:
        return [*out, f"Expected {RUNS} samples, got {len(rows)}."]
    speeds = _speeds(rows)
    low, mid, high = np.percentile(speeds, (25, 50, 75))
    if high - low > MAX_SPREAD * mid:
        out.append(
            f"The samples are unstable: half of them are between {low:.3g} and {high:.3g} tok/s. "
            "Let the machine cool down and rest, and measure again."
        )
    for i, (row, speed) in enumerate(zip(rows, speeds)):
        if not 1 / MAX_OFF <= speed / mid <= MAX_OFF:
            out.append(f"Sample {i} is {speed:.3g} tok/s where the median is {mid:.3g}.")
        needed = row["decode_tokens"] * sizes["L"] * sizes["K"]
        ahead = row.get("prefetch_used")
        used = row["hits"] + row["misses"] + (ahead if isinstance(ahead, NUMBER) else 0)
        if not 0.9 * needed <= used <= 1.1 * needed:
            out.append(f"Sample {i} used {used} experts where its tokens need {needed}.")
    try:
        experts = (trace := unpacked(made["trace"])).experts
        if (*experts.shape[1:], trace.num_experts) != (sizes["L"], sizes["K"], sizes["E"]):
            out.append("The trace is of another model.")
    except (ValueError, KeyError, OSError) as error:
        out.append(f"The trace cannot be read ({error}).")
    return out


def unpacked(text: str) -> Trace:
    """The trace of a file's content."""
    with temporary_folder() as work:
        file = work / "trace.npz"
        file.write_bytes(base64.b64decode(text, validate=True))
        return Trace.load(file)


def received(file: Path) -> dict[str, Any]:
    """Read and check a file that somebody sent."""
    made = read_json(file, LIKE)
    try:
        wrong = problems(made)
    except (ArithmeticError, RecursionError) as error:  # values that ``share`` never writes
        wrong = [describe(error)]
    if wrong:
        raise ValueError(f"{file}: {' '.join(wrong)}")
    return made


def traces() -> dict[str, Trace]:
    """The traces of ``data/community``, by the names of their files."""
    return {file.stem: unpacked(made["trace"]) for file, made in _received(DATA / "community")}


def _received(folder, pattern="*.json"):
    """Yields each file of a folder and its content, if ``share`` wrote it."""
    for file in sorted(folder.glob(pattern)):
        with suppress(ValueError, OSError):
            yield file, received(file)


def of_such_a_machine(sizes: ModelSizes, card: dict[str, Any]) -> list[str]:
    """Lines on speeds that are known for a model's shapes on a machine like ``card``.

    Files that ``share`` wrote into this folder come before those of ``data/community``.
    """
    out = []
    for file, made in (*_received(Path(), "*_cores_*.json"), *_received(DATA / "community")):
        machine = made["machine"]
        alike = all(machine[name] == card[name] for name in ("cpu", "gpu"))
        alike &= abs(machine["memory_nbytes"] / card["memory_nbytes"] - 1) < SAME_MEMORY
        alike &= card.get("cores") in (None, machine["cores"])
        if alike and all(made["sizes"][name] == getattr(sizes, name) for name in LIKE["sizes"]):
            held = np.median([row["held_nbytes"] for row in made["rows"]]) / 1e9
            out.append(
                f"{records.q(_speeds(made['rows']), '.3g')} tok/s with {held:.2g} GB held "
                f"({shorten(Path(*file.parts[-3:]))}, {shorten(machine['date'])})"
            )
    return out


def _speeds(rows):
    return np.array([row["decode_tokens"] / row["decode_s"] for row in rows])


def _cell(text):
    """Escape a text for a table's cell, so that none of it is Markdown or HTML."""
    return re.sub(r"([\\`|\[\]])", r"\\\1", html.escape(shorten(text), quote=False))


HEAD = """# Measured by others, and by us

Decoding speeds that `python -m moelab share MODEL` wrote, exact text, n=7, after 32 tokens of \
warm-up. To add your machine, run it and send the file in a pull request. A test checks it.

| tok/s [quartiles] | model | GB held | hits | MB read a token | machine | moelab | |
|---|---|---|---|---|---|---|---|
"""


def page(files: list[Path]) -> str:
    """Write the files as a Markdown table, the fastest first."""
    lines = {}
    for file in files:
        made = received(Path(file))
        samples, machine = records.table(made), made["machine"]
        memory = f"{machine['memory_nbytes'] / 2**30:.0f} GiB"
        cells = [
            records.q(samples.tok_s, ".3g"),
            _cell(made["settings"]["model"]),
            records.m(samples.held_nbytes, ".2g", 1e-9),
            records.m(samples.hit_rate, ".0%"),
            records.m(samples.read_nbytes_per_token, ".0f", 1e-6),
            _cell(f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {memory}"),
            f"{_cell(machine['moelab'])}, {_cell(machine['date'])}",
            f"[file]({quote(Path(file).name)})",
        ]
        lines[f"| {' | '.join(cells)} |"] = samples.tok_s.median()
    return HEAD + "\n".join(sorted(lines, key=lines.get, reverse=True)) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Decode with fixed settings for some minutes and write one small file: machine, versions, "
        "samples, bytes and a trace of the routing. Send it to data/community as a pull request. "
        "Nothing is written if other programs were busy or the samples are unstable."
    )
    add_model(parser)
    parser.add_argument(
        "--out", type=not_empty, metavar="FILE", help="(default: by model and date, in this folder)"
    )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    print(share(args.model, args.out))


def main(out: str, *files: str) -> None:
    """Write the page of files."""
    Path(out).write_text(page([Path(file) for file in files]), encoding="utf-8")

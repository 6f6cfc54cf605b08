"""``python -m moelab check``: does this machine have what moelab and its notebooks need?"""

import argparse
import os
import shlex
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import psutil

from .. import StreamConfig, kernels, plan
from ..checkpoint import Checkpoint, CheckpointError
from ..commands.argument_types import not_empty
from ..memory import memory_available, memory_limit
from ..shipped import shipped
from ..streaming.build import build_model
from ..streaming.facts import ModelFacts
from ..streaming.model import find, tokenizer_of
from ..system import HERE
from . import records
from .machine import READ_NBYTES, card, cold_gain, read_speed
from .oscache import drop_pages

MIN_MEMORY_NBYTES = 3 << 30  # enough for tiny-moe, JupyterLab and a browser
MIN_DISK_NBYTES = 2 << 30  # enough for notebook 02's synthesized checkpoint
MIN_COLD_BYTES_PER_S = 0.2e9  # slower: a network or a spinning disk
MORE_RUNS = 4  # of a cold read that was too slow


def dispatch_cost() -> tuple[float, float]:
    """Seconds of one small operation, in a chain that is evaluated at its end and by itself."""

    def timed(each):
        x = mx.zeros((1, 8))
        mx.eval(x)
        started = time.perf_counter()
        for _ in range(200):
            x = x + 1
            if each:
                mx.eval(x)
        mx.eval(x)
        return (time.perf_counter() - started) / 200

    timed(True)  # warm-up
    return tuple(statistics.median(timed(each) for _ in range(5)) for each in (False, True))


def findings(model: str | Path | None = None) -> Iterator[tuple[bool, str, str]]:
    """Yield for each thing needed whether all is well, what was found, and else the remedy."""
    c = card()
    where = f"GPU, {c['gpu']}"
    if not c["gpu"]:
        where = f"CPU backend (float32), {c['cpu']}, {c['cores']} cores"
    yield True, f"Python {c['python']}, mlx {c['mlx']}, mlx-lm {c['mlx-lm']} on {where}", ""
    if c["device"] == "cpu":
        yield True, f"kernels: {kernels.describe()}", ""

    free, limit = memory_available(), memory_limit()
    of = f"{psutil.virtual_memory().total / 2**30:.1f} GiB"
    of += f", cgroup limit {limit / 2**30:.1f} GiB" if limit else ""
    yield (
        # macOS compresses what others keep and do not use, and says itself when memory is short.
        free >= MIN_MEMORY_NBYTES or HERE.pressure() == 1,
        f"memory: {free / 2**30:.1f} GiB available of {of}",
        f"{MIN_MEMORY_NBYTES >> 30} GiB are needed: close other programs or raise the limit",
    )
    try:
        folder, lacks = Path(model or shipped("models", "tiny-moe")), None
    except FileNotFoundError as error:  # an installed moelab has no data
        folder, lacks = Path.cwd(), str(error).partition(". ")[0]
    disk = shutil.disk_usage(folder).free
    yield (
        disk >= MIN_DISK_NBYTES,
        f"disk: {disk / 2**30:.1f} GiB free where {folder.name}/ lies",
        f"{MIN_DISK_NBYTES >> 30} GiB are needed for synthesized checkpoints: make room",
    )
    yield _ssd(folder, lacks)

    chained, evaluated = dispatch_cost()
    yield (
        evaluated < 1e-3 or c["device"] == "gpu",  # a GPU that idled may take longer, too
        f"dispatch: one small operation {chained * 1e6:.0f} us in a chain, "
        f"{evaluated * 1e6:.0f} us evaluated by itself, with a {_load()}",
        "over 1 ms: the machine is busy, so timings will mean little; stop other work",
    )
    if model:
        yield from _slots_of(Path(model))


def _load():
    return f"load of {os.getloadavg()[0]:.1f} on this machine's {card()['cores']} cores"


def _ssd(folder, lacks):
    """What the SSD reads of the largest model file, if one is large enough."""
    files = [f for f in folder.glob("*.safetensors") if f.is_file()]  # no dead link, no FIFO
    path = max(files, key=lambda f: f.stat().st_size, default=None)
    if path is None or path.stat().st_size < 8 * READ_NBYTES:
        what = lacks or f"{folder.name}/ has no model file of 8 MB or more"
        return not lacks, f"SSD: not measured, {what}", "name a model: python -m moelab check MODEL"
    how = drop_pages(path)
    cold, cold_4, warm, warm_4 = (
        read_speed(path, cold, n) / 1e9 for cold in (True, False) for n in (1, 4)
    )
    for _ in range(MORE_RUNS):  # other work makes a run slower, nothing makes a disk faster
        if cold_4 * 1e9 < MIN_COLD_BYTES_PER_S:
            cold_4 = max(cold_4, read_speed(path, True, 4) / 1e9)
    return (
        cold_4 * 1e9 >= MIN_COLD_BYTES_PER_S,
        f"SSD: random 1 MiB reads of {path.name}, GB/s with 1 and 4 at a time: "
        f"cold {cold:.2f}, {cold_4:.2f} ({how}); warm {warm:.2f}, {warm_4:.2f}",
        f"under {MIN_COLD_BYTES_PER_S / 1e9:.1f} GB/s cold in each of {1 + MORE_RUNS} runs, with a "
        f"{_load()}: if it is busy, check again when it is not; else put the model on an SSD, not "
        "on a network or spinning disk",
    )


def _slots_of(model):
    """Say which slots the commands would choose for a model, and the share of experts they hold."""
    tokenizer_of(model)
    try:
        p = plan(model, StreamConfig(lazy_logits=True))
    except CheckpointError:
        raise
    except ValueError as error:  # the model does not fit; the error's last sentence says what to do
        what, _, remedy = str(error).rstrip(".").rpartition(". ")
        yield False, what, remedy
        return
    if p.config.kernels == "fast":
        built = build_model(Checkpoint(model), p.config)[0]
        kernels.use(built, half_scales=True)
        found = (f"{n} {name}" for name, n in kernels.blocks_of(built).items())
        found = ", ".join(found) or "none that is known"
        yield True, f"{model.name}: blocks in one piece: {found}; others module by module", ""
    one = p.facts.slot_nbytes
    held, all_experts, token, disk = (  # in the units of the plan's own line
        f"{nbytes / 1e6:,.0f} MB"
        for nbytes in (p.slots * one, p.num_experts * one, p.top_k * one, p.facts.checkpoint_nbytes)
    )
    yield True, f"{model.name}, {disk} on disk: {p}", ""
    yield (
        True,
        f"{model.name}: the slots hold {held} of {all_experts} of experts; a token needs {token}, "
        "of which it reads what is in no slot, from the page cache or the SSD",
        "",
    )
    if p.slots < p.num_experts and (gain := cold_gain(p.facts, p.direct)):
        so = "a repack would hardly gain"
        if gain.quartiles[0] > 1:  # more than chance
            so = f"`python -m moelab repack {shlex.quote(str(model))} OUT` writes such a copy"
        yield True, f"{model.name}: {gain}: {so}", ""


def check(model: str | Path | None = None, file: str | Path | None = None) -> bool:
    """Print one line for each finding, and write them to a file; returns whether all is well."""
    if model is not None:  # a draft or a model without experts is refused at once, with what it is
        model = find(model, download=False)
        ModelFacts.of(model, StreamConfig())
    rows = []
    for ok, what, remedy in findings(model):
        print(f"[{'ok' if ok else 'fail'}] {what}" + ("" if ok else f" -> {remedy}"))
        rows.append({"ok": ok, "what": what} | ({} if ok else {"remedy": remedy}))
    if file is not None:
        records.write(file, {"kind": "check", "machine": card(), "rows": rows})
    return all(row["ok"] for row in rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "One line for each thing that is needed, [ok] or [fail] with the remedy. Exit status 1: "
        "something failed."
    )
    what = "a model folder: the slots that would be chosen, its own files' reads"
    parser.add_argument("model", type=not_empty, metavar="[MODEL]", nargs="?", help=what)
    kept = "write machine and findings there, to be sent"
    parser.add_argument("--json", type=not_empty, metavar="FILE", help=kept)


def run(args: argparse.Namespace) -> int:
    return 0 if check(args.model, args.json) else 1

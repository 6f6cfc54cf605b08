"""What this machine is and whether it has what the lab needs.

``card`` and ``card_line`` say where a number was measured, in every figure and every record.
``check`` is the command ``check``.
"""

import argparse
import functools
import importlib.metadata
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from .. import DATA, kernels
from ..checkpoint import Checkpoint, CheckpointError
from ..commands.argument_types import not_empty
from ..memory import memory_available, memory_limit
from ..streaming.build import build_model
from ..streaming.model import tokenizer_of
from ..streaming.reading import native
from .oscache import drop_pages

MIN_MEMORY_NBYTES = 3 << 30  # enough for tiny-moe, JupyterLab and a browser
MIN_DISK_NBYTES = 2 << 30  # enough for notebook 02's synthesized checkpoint
MIN_COLD_BYTES_PER_S = 0.2e9  # slower: a network or a spinning disk
MAX_EVALUATION_S = 1e-3  # longer: a busy machine
READ_NBYTES = 1 << 20  # about one expert of a large model


def _first_line(*command) -> str:
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=5)
            .stdout.strip()
            .split("\n")[0]
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _cpu_name() -> str:
    if sys.platform == "darwin":
        return _first_line("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


@functools.lru_cache
def card() -> dict[str, Any]:
    """This machine and its versions, for a figure's subtitle and for a record."""
    info = mx.device_info()
    gpu = info.get("device_name", "GPU") if mx.default_device() == mx.gpu else None
    limit = memory_limit()
    total = psutil.virtual_memory().total
    return {
        "cpu": _cpu_name(),
        "gpu": gpu,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_nbytes": min(total, limit) if limit else total,
        "os": f"{platform.system()} {platform.release()}",
        "device": "gpu" if gpu else "cpu",
        "backend": "CPU" if not gpu else "Metal" if mx.metal.is_available() else "CUDA",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "moelab")},
        "date": date.today().isoformat(),
    }


def card_line(card: dict[str, Any] | None = None) -> str:
    """Write a ``card`` (None: this machine's) in one line."""
    c = card or globals()["card"]()
    where = f"{c['backend']} backend" + (f", {c['gpu']}" if c["gpu"] else "")
    versions = ", ".join(f"{name} {c[name]}" for name in ("mlx", "mlx-lm", "moelab"))
    memory, system = f"{c['memory_nbytes'] / 2**30:.0f} GiB", c["os"].split()[0]
    return f"{c['cpu']}, {c['cores']} cores, {memory}, {system}; {where}; {versions}; {c['date']}"


def read_speed(
    path: str | Path,
    cold: bool,
    readers: int,
    nbytes: int = READ_NBYTES,
    count: int = 128,
    direct: bool = False,
) -> float:
    """Bytes per second of random reads of a file, each of another place; ``cold`` drops its pages.

    ``direct`` reads past the page cache (Linux), whose own work can take longer than the disk;
    ``nbytes`` must then be a multiple of ``native.ALIGNED``, at most ``native.BUFFER_NBYTES``.
    """
    size = os.path.getsize(path)
    places = random.Random(0).sample(range(size // nbytes), min(count, size // nbytes))
    fd = os.open(path, os.O_RDONLY)
    try:
        if direct := direct and hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # a file system that cannot
                past = os.open(path, os.O_RDONLY | os.O_DIRECT)
                os.close(fd)
                fd = past
        if cold:
            drop_pages(path)
            if sys.platform == "darwin":
                import fcntl

                fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        elif hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

        def read(mine):
            buffer = (
                native.huge_pages(native.BUFFER_NBYTES)[:nbytes] if direct else bytearray(nbytes)
            )
            return sum(os.preadv(fd, [buffer], place * nbytes) for place in mine)

        with ThreadPoolExecutor(readers) as pool:
            started = time.perf_counter()
            total = sum(pool.map(read, [places[i::readers] for i in range(readers)]))
            return total / (time.perf_counter() - started)
    finally:
        os.close(fd)


def dispatch_cost(count: int = 200) -> tuple[float, float]:
    """Seconds of one small operation, in a chain that is evaluated at its end and by itself."""

    def timed(each):
        x = mx.zeros((1, 8))
        mx.eval(x)
        started = time.perf_counter()
        for _ in range(count):
            x = x + 1
            if each:
                mx.eval(x)
        mx.eval(x)
        return (time.perf_counter() - started) / count

    timed(True)  # warm-up
    return tuple(statistics.median(timed(each) for _ in range(5)) for each in (False, True))


def _file_to_read(folder):
    """The largest model file of a folder; None if none is large enough."""
    files = [f for f in folder.glob("*.safetensors") if f.is_file()]  # no dead link, no FIFO
    largest = max(files, key=lambda f: f.stat().st_size, default=None)
    return largest if largest and largest.stat().st_size >= 8 * READ_NBYTES else None


def findings(model: str | Path | None = None) -> Iterator[tuple[bool, str, str]]:
    """Yield for each thing needed whether all is well, what was found, and else the remedy."""
    c = card()
    where = (
        f"GPU, {c['gpu']}" if c["gpu"] else f"CPU backend (float32), {c['cpu']}, {c['cores']} cores"
    )
    yield True, f"Python {c['python']}, mlx {c['mlx']}, mlx-lm {c['mlx-lm']} on {where}", ""

    if c["device"] == "cpu":
        yield True, f"kernels of StreamConfig: {kernels.describe()}", ""

    free, limit = memory_available(), memory_limit()
    of = f"{psutil.virtual_memory().total / 2**30:.1f} GiB" + (
        f", cgroup limit {limit / 2**30:.1f} GiB" if limit else ""
    )
    yield (
        free >= MIN_MEMORY_NBYTES,
        f"memory: {free / 2**30:.1f} GiB available of {of}",
        f"{MIN_MEMORY_NBYTES >> 30} GiB are needed: close other programs or raise the limit",
    )

    folder = Path(model or DATA / "models" / "tiny-moe")
    folder = folder if folder.is_dir() else Path.cwd()  # an installed moelab has no data
    disk = shutil.disk_usage(folder).free
    yield (
        disk >= MIN_DISK_NBYTES,
        f"disk: {disk / 2**30:.1f} GiB free where {folder.name}/ lies",
        f"{MIN_DISK_NBYTES >> 30} GiB are needed for synthesized checkpoints: make room",
    )

    path = _file_to_read(folder)
    if path is None:
        yield (
            model is not None,
            f"SSD: not measured, {folder.name}/ has no model file of 8 MB or more",
            "name a model: python -m moelab check MODEL",
        )
    else:
        how = drop_pages(path)
        speeds = {
            (cold, n): read_speed(path, cold, n) / 1e9 for cold in (True, False) for n in (1, 4)
        }
        yield (
            speeds[True, 4] * 1e9 >= MIN_COLD_BYTES_PER_S,
            f"SSD: random 1 MiB reads of {path.name}, GB/s with 1 and 4 at a time: "
            f"cold {speeds[True, 1]:.2f}, {speeds[True, 4]:.2f} ({how}); "
            f"warm {speeds[False, 1]:.2f}, {speeds[False, 4]:.2f}",
            f"under {MIN_COLD_BYTES_PER_S / 1e9:.1f} GB/s cold: put the model on an SSD, not on a "
            "network or spinning disk",
        )

    chained, evaluated = dispatch_cost()
    yield (
        evaluated < MAX_EVALUATION_S,
        f"dispatch: one small operation {chained * 1e6:.0f} us in a chain, "
        f"{evaluated * 1e6:.0f} us evaluated by itself",
        "over 1 ms: the machine is busy, so timings will mean little; stop other work",
    )

    if model:
        yield from _slots_of(Path(model))


def _slots_of(model):
    """Say which slots the commands would choose for a model, and the share of experts they hold."""
    from .. import StreamConfig, plan

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


def check(model: str | Path | None = None) -> bool:
    """Print one line for each finding; returns whether all is well."""
    if model is not None and not Path(model).is_dir():
        raise ValueError(f"{model}: expected a model folder, found none. Check the name.")
    good = True
    for ok, what, remedy in findings(model):
        print(f"[{'ok' if ok else 'fail'}] {what}" + ("" if ok else f" -> {remedy}"))
        good &= ok
    return good


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "One line for each thing that is needed, [ok] or [fail] with the remedy. Exit status 1: "
        "something failed."
    )
    parser.add_argument(
        "model",
        type=not_empty,
        metavar="MODEL",
        nargs="?",
        help="a model folder: the slots that would be chosen, its own files' reads",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    return 0 if check(args.model) else 1

"""Describe this machine for figures and records, drop pages of files, and time reads of a file."""

import functools
import importlib.metadata
import os
import platform
import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import ENGINE
from ..kernels import code
from ..memory import memory_limit
from ..streaming.reading import native
from ..system import HERE

READ_NBYTES = 1 << 20  # about one expert of a large model


def _cpu_name() -> str:
    """Return the processor's name from the system, or from LLVM where the system has none."""
    kind = code.llvm.get_host_cpu_name() if code.llvm else ""
    return HERE.cpu_name() or f"{platform.machine()} {kind}".strip()


@functools.lru_cache
def card() -> dict[str, Any]:
    """Describe this machine and the versions of its software, for figures and for records."""
    gpu = mx.device_info().get("device_name", "GPU") if mx.default_device() == mx.gpu else None
    (total, _), limit = HERE.memory(), memory_limit()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_name(),
        "gpu": gpu,
        "cores": cores,
        "memory_nbytes": min(total, limit) if limit else total,
        "os": f"{platform.system()} {platform.release()}",
        "device": "gpu" if gpu else "cpu",
        "backend": "CPU" if not gpu else "Metal" if mx.metal.is_available() else "CUDA",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "moelab")},
        "engine": ENGINE,
        "date": date.today().isoformat(),
    }


def card_line(card: dict[str, Any] | None = None) -> str:
    """Write a ``card`` (None: this machine's) in one line."""
    c = card or globals()["card"]()
    where = f"{c['backend']} backend" + (f", {c['gpu']}" if c["gpu"] else "")
    versions = ", ".join(f"{name} {c[name]}" for name in ("mlx", "mlx-lm", "moelab"))
    memory, system = f"{c['memory_nbytes'] / 2**30:.0f} GiB", c["os"].split()[0]
    return f"{c['cpu']}, {c['cores']} cores, {memory}, {system}; {where}; {versions}; {made(c)}"


def engine_of(card: dict[str, Any]) -> int:
    """Return the number of the engine that made a record; if MLX alone made it, ``ENGINE``."""
    return card.get("engine", 1) or ENGINE


def made(card: dict[str, Any]) -> str:
    """Write a record's date and, if today's engine did not make it, the number of its engine."""
    engine = engine_of(card)
    return card["date"] + (f" by engine {engine} of {ENGINE}" if engine < ENGINE else "")


def drop_pages(path: str | Path) -> str:
    """Drop the pages of a file, or of a folder's tensor files, as far as possible without root.

    Returns how this was done, for the record of a cold measurement. On Linux, pages that are not
    yet written to the disk stay.
    """
    how = "no file"
    for file in Path(path).glob("*.safetensors") if os.path.isdir(path) else [path]:
        with open(file, "rb") as f:
            how = HERE.drop_pages(f.fileno())
    return how


def disk_read_nbytes() -> int | None:
    """Return the bytes read from the disk for this process; None if the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def read_speed(
    path: str | Path,
    cold: bool,
    readers: int,
    nbytes: int = READ_NBYTES,
    count: int = 128,
    direct: bool = False,
) -> float:
    """Measure random reads of a file in bytes per second; ``cold`` first drops the file's pages.

    ``direct`` reads past the page cache; the cache can be slower than the disk. With ``direct``,
    ``nbytes`` must be a multiple of ``native.ALIGNED``, and at most ``native.BUFFER_NBYTES``.
    """
    size = os.path.getsize(path)
    places = random.Random(0).sample(range(size // nbytes), min(count, size // nbytes))
    fd = HERE.open_direct(path) if direct else os.open(path, os.O_RDONLY)
    try:
        if cold:
            drop_pages(path)
        else:
            HERE.only_what_is_asked(fd)

        def read(mine):
            buffer = bytearray(nbytes)
            if direct:
                buffer = native.huge_pages(native.BUFFER_NBYTES)[:nbytes]
            return sum(os.preadv(fd, [buffer], place * nbytes) for place in mine)

        with ThreadPoolExecutor(readers) as pool:
            started = time.perf_counter()
            total = sum(pool.map(read, [places[i::readers] for i in range(readers)]))
            return total / (time.perf_counter() - started)
    finally:
        os.close(fd)

"""What this machine is and whether it has what the lab needs.

``card`` and ``card_line`` say where a number was measured: they stand in every figure and every recorded result.
``check`` is ``python -m moelab check``.
"""

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
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import mlx.core as mx
import psutil

from .. import DATA

MIN_MEMORY_NBYTES = 3 << 30  # tiny-moe, JupyterLab and a browser
MIN_DISK_NBYTES = 2 << 30
READ_NBYTES = 1 << 20


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


def _cgroup_values(*names):
    """Yields the value of the first of ``names`` (v2's, v1's) in this process's memory cgroup and in each above it."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        here = root / path.lstrip("/")
        for folder in [here, *here.parents]:
            for name in names:
                try:
                    yield folder, int((folder / name).read_text())
                    break
                except (OSError, ValueError):  # not there, or "max"
                    pass
            if folder == root:
                break


def memory_limit() -> int | None:
    """The smallest memory limit of the cgroups this process is in, in bytes, or None."""
    limits = [
        limit
        for _, limit in _cgroup_values("memory.max", "memory.limit_in_bytes")
        if limit < 1 << 60
    ]
    return min(limits, default=None)


def memory_available() -> int:
    """Bytes that this process may still take: what the system has free and what its cgroup leaves it.

    Pages of the page cache count as free, in the cgroup as outside it.
    """
    free = psutil.virtual_memory().available
    for folder, limit in _cgroup_values("memory.max", "memory.limit_in_bytes"):
        if limit < 1 << 60:
            try:
                stat = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                used = int(stat.get("total_rss", stat.get("rss", stat.get("anon", 0))))
            except OSError:
                used = 0
            free = min(free, limit - used)
    return free


@functools.lru_cache
def card() -> dict:
    """The machine and the versions, for a figure's subtitle and a result's record."""
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


def card_line(card: dict | None = None) -> str:
    """``card`` (default: this machine's) in one line."""
    c = card or globals()["card"]()
    where = f"{c['backend']} backend" + (f", {c['gpu']}" if c["gpu"] else "")
    versions = ", ".join(f"{name} {c[name]}" for name in ("mlx", "mlx-lm", "moelab"))
    return f"{c['cpu']}, {c['cores']} cores, {c['memory_nbytes'] / 2**30:.0f} GiB, {c['os'].split()[0]}; {where}; {versions}; {c['date']}"


def drop_pages(path) -> str:
    """Drops a file, or a model folder's tensors, from the page cache as far as this system allows without root.

    Returns:
        str: How, for the record of a measurement that calls itself cold.
    """
    if not hasattr(os, "posix_fadvise"):
        return "F_NOCACHE: nothing new is cached, but what already was may still answer"
    for file in Path(path).glob("*.safetensors") if os.path.isdir(path) else (path,):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return "POSIX_FADV_DONTNEED"


def read_speed(
    path, cold: bool, readers: int, nbytes: int = READ_NBYTES, count: int = 128
) -> float:
    """Bytes per second of random reads of ``nbytes`` each, each place read once, ``readers`` at a time."""
    size = os.path.getsize(path)
    places = random.Random(0).sample(range(size // nbytes), min(count, size // nbytes))
    fd = os.open(path, os.O_RDONLY)
    try:
        if cold:
            drop_pages(path)
            if sys.platform == "darwin":
                import fcntl

                fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        elif hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

        def read(mine):
            buffer = bytearray(nbytes)
            return sum(os.preadv(fd, [buffer], place * nbytes) for place in mine)

        with ThreadPoolExecutor(readers) as pool:
            started = time.perf_counter()
            total = sum(pool.map(read, [places[i::readers] for i in range(readers)]))
            return total / (time.perf_counter() - started)
    finally:
        os.close(fd)


def dispatch_cost(count: int = 200) -> tuple[float, float]:
    """Seconds of one small operation: chained with ``count`` others, and evaluated by itself (medians of 5)."""

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


def _file_to_read(model):
    files = [
        f for f in Path(model or DATA).rglob("*.safetensors") if f.stat().st_size >= 8 * READ_NBYTES
    ]
    return max(files, key=lambda f: f.stat().st_size, default=None)


def findings(model=None):
    """Yields ``(ok, what, remedy)`` for each thing that a reader needs; the remedy counts when not ok."""
    yield (
        sys.version_info >= (3, 11),
        f"Python {platform.python_version()}",
        "install Python 3.11 or newer",
    )

    c = card()
    where = (
        f"GPU, {c['gpu']}" if c["gpu"] else f"CPU backend (float32), {c['cpu']}, {c['cores']} cores"
    )
    yield True, f"mlx {c['mlx']}, mlx-lm {c['mlx-lm']} on {where}", ""

    free, limit = memory_available(), memory_limit()
    of = f"{psutil.virtual_memory().total / 2**30:.1f} GiB" + (
        f", cgroup limit {limit / 2**30:.1f} GiB" if limit else ""
    )
    yield (
        free >= MIN_MEMORY_NBYTES,
        f"memory: {free / 2**30:.1f} GiB available of {of}",
        (
            f"{MIN_MEMORY_NBYTES / 2**30:.0f} GiB are needed: close other programs or raise the limit"
        ),
    )

    folder = (
        Path(model) if model and Path(model).is_dir() else DATA if DATA.is_dir() else Path.cwd()
    )
    disk = shutil.disk_usage(folder).free
    yield (
        disk >= MIN_DISK_NBYTES,
        f"disk: {disk / 2**30:.1f} GiB free where {folder.name}/ lies",
        (f"{MIN_DISK_NBYTES / 2**30:.0f} GiB are needed for synthesized checkpoints: make room"),
    )

    path = _file_to_read(folder)
    if path is None:
        yield (
            False,
            "SSD: no model file of 8 MB or more to read",
            "name a model: python -m moelab check MODEL",
        )
    else:
        how = drop_pages(path)
        speeds = {
            (cold, n): read_speed(path, cold, n) / 1e9 for cold in (True, False) for n in (1, 4)
        }
        yield (
            speeds[True, 4] >= 0.2,
            (
                f"SSD: random 1 MiB reads of {path.name}, GB/s with 1 and 4 at a time: "
                f"cold {speeds[True, 1]:.2f}, {speeds[True, 4]:.2f} ({how}); warm {speeds[False, 1]:.2f}, {speeds[False, 4]:.2f}"
            ),
            "under 0.2 GB/s cold: put the model on an SSD, not on a network or spinning disk",
        )

    chained, evaluated = dispatch_cost()
    yield (
        evaluated < 1e-3,
        (
            f"dispatch: one small operation {chained * 1e6:.0f} us in a chain, {evaluated * 1e6:.0f} us evaluated by itself"
        ),
        "over 1 ms: the machine is busy, so timings will mean little; stop other work",
    )

    if model:
        from .. import StreamConfig, footprint

        slots = max(16, footprint(model, StreamConfig(mode="resident")).top_k)
        f = footprint(model, StreamConfig(slots=slots))
        yield (
            f.total_nbytes <= free,
            f"{Path(model).name}: {_size(f.checkpoint_nbytes)} on disk; with {slots} slots a layer it takes {_size(f.total_nbytes)} of memory "
            f"(backbone {_size(f.backbone_nbytes)}, slots {_size(f.slots_nbytes)}, scales {_size(f.scales_nbytes)}), caches on top",
            "more than is available: take fewer slots (at least top-k)",
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def check(model=None) -> bool:
    """Prints one line for each finding; returns whether all is well."""
    if model is not None and not Path(model).is_dir():
        raise ValueError(f"{model}: expected a model folder, found none. Check the name.")
    good = True
    for ok, what, remedy in findings(model):
        print(f"[{'ok' if ok else 'fail'}] {what}" + ("" if ok else f" -> {remedy}"))
        good &= ok
    return good

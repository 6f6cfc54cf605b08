"""How much memory this process may still take, and how it gives freed memory back."""

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from math import exp, log
from mmap import PAGESIZE
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import mlx.core as mx
import psutil

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
NO_LIMIT_NBYTES = 1 << 60  # cgroup v1 has such a number in place of "max"
# Where memory is short, glibc gives each array of so many bytes or more a mapping of its own, which
# goes back to the system when the array is freed. glibc's own limit rises to 32 MB, and below it
# freed arrays stay in the heap: 100 to 200 MB after a prompt. A mapping costs a page fault for each
# new page: a prompt of 400 tokens took 19% longer when arrays from 256 KB up had mappings, and 4%
# longer when only those from 8 MB up had.
MAPPED_NBYTES, M_MMAP_THRESHOLD = 8 << 20, -3
# The most bytes of recurrent states that are kept for the positions of one verify pass; for more,
# the recurrence is computed again.
STATES_NBYTES = 256 * 2**20
# Seconds to bring a page back. Linux: 4 KB from a swap file on an SSD (measured; from zram less).
# Mac: 16 KB from the compressor at 1.6 GB/s (assumed; no Mac was measured).
PAGE_S = 10e-6 if sys.platform == "darwin" else 60e-6
PRESSURE_LEVEL = b"kern.memorystatus_vm_pressure_level"  # 1 normal, 2 warning, 4 critical
# Mach's ``vm_statistics64``: its flavor, its words of 4 bytes (revision 1, which later ones begin
# with), and the places of 8 bytes where it counts pages decompressed and compressed. What psutil
# calls swapped there are files' pages.
VM_INFO64, VM_WORDS, DECOMPRESSIONS, COMPRESSIONS = 4, 38, 12, 13
# What macOS and other programs need of a Mac's memory is taken as lognormal: its median on 16 GiB,
# the power of the memory with which it grows, its spread. Sources on the side ``fit`` of
# data/published.csv bound it. Of 16 GiB engines swapped with 3.4 and 5.8 GB left (Godwit, qwisp),
# not with 7.3 (Godwit). Of 48 one compressed with 17 to 24 left (colibri), another did not with 18
# (flash-moe). What macOS withholds from a GPU grows with that power: 4.5 GB of 16, 22 of 128.
NEED_NBYTES, NEED_GROWTH, NEED_SPREAD = 6.5e9, 0.75, 0.15
# On a Mac that swaps a token takes so many times as long: 3.5 and 4.2 (qwisp), 12.8 (Godwit).
CLIFF = 6
WHY_LEFT = (
    "for macOS, other programs and the page cache; a Mac that runs short swaps, and a token then "
    f"takes some {CLIFF} times as long, by published speeds"
)
# How often a Mac may swap: what a few more slots gain, over what swapping costs. It is taken that
# they gain 3%, or 0.5% where fewer than a third of the experts fit, and that every expert in a slot
# gains half. With 0.5%, nine plans of data/results/cpu_planned_macs.json have 6 to 33% fewer slots
# than with 3%, and lose -1.5 to 2.7% of their speed. If only K slots in each layer fit, a model is
# refused only where a Mac swaps more often than not.
RISKS = 0.005 / (CLIFF - 1), 0.03 / (CLIFF - 1), 0.5 / (CLIFF - 1), 0.5
FEW_SHARE = 1 / 3


class Most(NamedTuple):
    """Bytes that a plan may fill: with few experts in slots, some, every one, only K of a layer."""

    few: float
    some: float
    every: float
    least: float


def most_for_a_model(ram_nbytes: float, is_mac: bool | None = None) -> Most:
    """What a plan may fill of a machine's memory (``is_mac``: None for this machine)."""
    is_mac = sys.platform == "darwin" if is_mac is None else is_mac
    if not is_mac:
        return Most(*4 * (float("inf"),))
    return Most(*(ram_nbytes - exp(_log_need(ram_nbytes).inv_cdf(1 - risk)) for risk in RISKS))


def swap_risk(ram_nbytes: float, filled_nbytes: float) -> float:
    """How probably a Mac swaps that is filled so far."""
    return 1 - _log_need(ram_nbytes).cdf(log(max(1.0, ram_nbytes - filled_nbytes)))


def gpu_limit(ram_nbytes: float) -> float:
    """The bytes of a Mac's memory that macOS, by its version, lets the GPU have at the least."""
    return ram_nbytes * (2 / 3 if ram_nbytes < 37 << 30 else 3 / 4)


def _log_need(ram_nbytes):
    return NormalDist(log(NEED_NBYTES * (ram_nbytes / (16 << 30)) ** NEED_GROWTH), NEED_SPREAD)


def _cgroups() -> Iterator[tuple[Path, int]]:
    """The folder and the limit of this process's memory cgroup and of each above it, if limited."""
    try:
        groups = [line.split(":", 2) for line in OWN_CGROUPS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        root = CGROUPS / controllers
        here = root / path.lstrip("/")
        for folder in [here, *here.parents]:
            # Above memory.high the kernel slows a process down until it hardly runs.
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
                with suppress(OSError, ValueError):  # not there, or "max"
                    if (limit := int((folder / name).read_text())) < NO_LIMIT_NBYTES:
                        yield folder, limit
            if folder == root:
                break


def memory_limit() -> int | None:
    """The smallest memory limit of the cgroups this process is in, in bytes, or None."""
    return min((nbytes for _, nbytes in _cgroups()), default=None)


def _held(folder):
    """Bytes of a cgroup that the kernel cannot take back: all but the page cache."""
    for name in ("memory.current", "memory.usage_in_bytes"):
        try:
            used = int((folder / name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        prefix = "total_" if "total_inactive_file" in stat else ""  # v1: with the groups below it
        pages = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        return used - pages - int(stat.get("slab_reclaimable", 0))
    return 0


def memory_in_cgroups() -> int | None:
    """Bytes that this process's cgroups still give it, page cache taken back; None: no limit."""
    return min((nbytes - _held(folder) for folder, nbytes in _cgroups()), default=None)


def memory_available() -> int:
    """Bytes of the machine's memory that this process may still take, page cache taken back."""
    system, group = psutil.virtual_memory().available, memory_in_cgroups()
    return system if group is None else min(system, group)


def swapped_s() -> tuple[float, float] | None:
    """Seconds so far to bring pages back from swap, and as many for each page that went there.

    Linux: this process's pages, and its code that is read again; None if no page is in swap. Mac:
    the pages that all programs have in the memory compressor, from which macOS swaps; None while
    memory is not short.
    """
    if sys.platform == "darwin":
        return _of_mac(ctypes.CDLL(None))
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return _of_linux(status, resource.getrusage(resource.RUSAGE_SELF).ru_majflt)


def _of_linux(status, faults):
    """``swapped_s`` of the text of /proc/self/status and the pages that were waited for."""
    _, _, swap = status.partition("VmSwap:")
    pages = int(swap.split()[0]) * 1024 // PAGESIZE if swap else 0
    return (faults * PAGE_S, (faults + pages) * PAGE_S) if pages else None


def _of_mac(libc):
    """``swapped_s`` of what a Mac's C library answers."""
    level, nbytes = ctypes.c_int(), ctypes.c_size_t(4)
    libc.sysctlbyname(PRESSURE_LEVEL, ctypes.byref(level), ctypes.byref(nbytes), None, 0)
    counts, words = (ctypes.c_uint64 * (VM_WORDS // 2))(), ctypes.c_uint32(VM_WORDS)
    if level.value < 2 or libc.host_statistics64(_host(), VM_INFO64, counts, ctypes.byref(words)):
        return None
    return counts[DECOMPRESSIONS] * PAGE_S, counts[COMPRESSIONS] * PAGE_S


@cache
def _host():
    """The port of a Mac's kernel; each call of ``mach_host_self`` takes one more right to it."""
    return ctypes.c_uint32(ctypes.CDLL(None).mach_host_self())


def memory_on_gpu() -> int | None:
    """Bytes that a GPU's arrays may still take (Metal: of the machine's memory); None on a CPU."""
    if mx.default_device() == mx.cpu:
        return None
    info = mx.device_info()
    if mx.metal.is_available():
        return info["max_recommended_working_set_size"] - mx.get_active_memory()
    return info["free_memory"] + mx.get_cache_memory()


def return_free_memory() -> None:
    """Return to the system the memory that a prompt's arrays left free in glibc's heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def keep_no_holes() -> None:
    """Have the C library give each large array of this process its own mapping from now on."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_NBYTES)

"""How much memory this process may still take, and how it gives freed memory back."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import mlx.core as mx

from .system import HERE, Mac

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
# Where memory is short, each array of ``MAPPED_NBYTES`` or more gets a mapping of its own, which
# goes back to the system when the array is freed. glibc's own threshold rises to 32 MB, and smaller
# arrays stay in the heap when freed: 100 to 200 MB after a prompt. A mapping costs a page fault for
# each new page. A prompt of 400 tokens took 19% longer with mappings for arrays from 256 KB up, and
# 4% longer with mappings for arrays from 8 MB up.
MAPPED_NBYTES, M_MMAP_THRESHOLD = 8 << 20, -3
# The most bytes of recurrent states that are kept for the positions of one verify pass. If the
# states need more, the recurrence is computed again.
STATES_NBYTES = 256 * 2**20
# Seconds to swap a page in. Linux: 4 KB from a swap file on an SSD (measured; zram takes less).
# Mac: 16 KB from the compressor at 1.6 GB/s (assumed; no Mac was measured).
PAGE_S = 10e-6 if isinstance(HERE, Mac) else 60e-6
# The memory that macOS and other programs need is assumed to be lognormal. ``NEED_NBYTES`` is the
# median on a Mac of 16 GiB; the median grows as the Mac's memory to the power ``NEED_GROWTH``. The
# sources whose ``side`` is ``fit`` (data/recipes/published.py) are the evidence. Macs of 16 GiB
# swapped when engines left 3.4 GB (Godwit) and 5.8 GB (qwisp) to the system, but not with 7.3 GB
# left (Godwit). Macs of 48 GiB had to compress memory with 17 to 24 GB left (colibri), but not
# with 18 GB left (flash-moe). The memory that macOS withholds from a GPU grows by the same power:
# 4.5 of 16 GB, 22 of 128 GB.
NEED_NBYTES, NEED_GROWTH, NEED_SPREAD = 6.5e9, 0.75, 0.15
# A token's slowdown on a Mac that swaps; published: 3.5 and 4.2 (qwisp), 12.8 (Godwit).
CLIFF = 6
# MLX keeps so many bytes of freed arrays in a streamed model's call on Metal. Its own limit is 0.95
# of what Metal recommends. A prompt's parts free arrays of many sizes, which later arrays of other
# sizes cannot take over, so that gigabytes would stay.
FREED_NBYTES = 256 * 2**20
WHY_LEFT = (
    "for macOS, other programs and the page cache; a Mac that runs short swaps, and a token then "
    f"takes some {CLIFF} times as long, by published speeds"
)
# A plan for a Mac may swap with these probabilities, by field of ``Most``. A probability is the
# gain of the slots divided by the cost of swapping. Assumed gains: a few more slots 1%, a slot for
# every expert 50%. A model that gets only K slots in each layer is refused if swapping is more
# probable than not.
RISKS = 0.01 / (CLIFF - 1), 0.5 / (CLIFF - 1), 0.5


class Most(NamedTuple):
    """A plan's byte limits: with slots for some experts, for every expert, for K in each layer."""

    some: float
    every: float
    least: float


def most_for_a_model(ram_nbytes: float, is_mac: bool | None = None) -> Most:
    """Return the bytes of memory that a plan may fill (``is_mac`` None: as on this machine)."""
    is_mac = isinstance(HERE, Mac) if is_mac is None else is_mac
    if not is_mac:
        return Most(*3 * (float("inf"),))
    needs = (FREED_NBYTES + exp(_log_need(ram_nbytes).inv_cdf(1 - risk)) for risk in RISKS)
    return Most(*(ram_nbytes - need for need in needs))


@contextmanager
def few_freed() -> Iterator[None]:
    """Let MLX keep at most ``FREED_NBYTES`` of freed arrays while the block runs."""
    before = mx.set_cache_limit(FREED_NBYTES)
    try:
        yield
    finally:
        if before != FREED_NBYTES:  # else another thread's block runs, or ran when this one began
            mx.set_cache_limit(before)


def gpu_limit(ram_nbytes: float) -> float:
    """The bytes of a Mac's memory that every version of macOS lets the GPU have."""
    return ram_nbytes * (2 / 3 if ram_nbytes < 36 << 30 else 3 / 4)


def _log_need(ram_nbytes):
    return NormalDist(log(NEED_NBYTES * (ram_nbytes / (16 << 30)) ** NEED_GROWTH), NEED_SPREAD)


def _cgroups() -> Iterator[tuple[Path, int]]:
    """Yield (folder, limit) of each limited memory cgroup: this process's own and those above."""
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
            # Above memory.high Linux slows a process down until it hardly runs.
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
                with suppress(OSError, ValueError):  # no such file, or "max"
                    limit = int((folder / name).read_text())
                    if limit < 1 << 60:  # cgroup v1 writes a larger number for no limit
                        yield folder, limit
            if folder == root:
                break


def memory_limit() -> int | None:
    """The smallest memory limit of this process's cgroups, in bytes; None: no limit."""
    return min((nbytes for _, nbytes in _cgroups()), default=None)


def _held(folder):
    """Bytes of a cgroup that Linux cannot take back: all but page cache and reclaimable slabs."""
    for name in ("memory.current", "memory.usage_in_bytes"):
        try:
            used = int((folder / name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        prefix = "total_" if "total_inactive_file" in stat else ""  # v1: sums of all groups below
        pages = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        return used - pages - int(stat.get("slab_reclaimable", 0))
    return 0


def memory_in_cgroups() -> int | None:
    """Bytes that this process's cgroups still allow if page cache is dropped; None: no limit."""
    return min((nbytes - _held(folder) for folder, nbytes in _cgroups()), default=None)


def memory_available() -> int:
    """Bytes of memory that this process may still take if the page cache is dropped."""
    (_, system), group = HERE.memory(), memory_in_cgroups()
    return system if group is None else min(system, group)


def swapped_s() -> tuple[float, float] | None:
    """Return the seconds of swapping in so far, and what they become if all pages are swapped in.

    On Linux this process's pages count, also code that is read again from its file; None if no
    page is in swap. On a Mac the pages of all programs count that are in the memory compressor
    (macOS swaps from there); None while memory is not short.
    """
    pages = HERE.swapped_pages()
    return pages and tuple(n * PAGE_S for n in pages)


def memory_on_gpu() -> int | None:
    """Bytes that a GPU's arrays may still take (on Metal shared with the CPU); None on a CPU."""
    if mx.default_device() == mx.cpu:
        return None
    info = mx.device_info()
    if mx.metal.is_available():
        return info["max_recommended_working_set_size"] - mx.get_active_memory()
    return info["free_memory"] + mx.get_cache_memory()


def return_free_memory() -> None:
    """Return to the system the memory that a prompt's arrays left free in glibc's heap."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def keep_no_holes() -> None:
    """Have the C library give each large array of this process its own mapping from now on."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_NBYTES)

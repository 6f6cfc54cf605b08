"""Replay a trace through two caches: slots, and the page cache below them (notebook 03)."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np

from ..streaming.residency.layer import PART_NBYTES
from ..streaming.trace import Trace
from .costs import Costs
from .eviction import held


@dataclass(frozen=True)
class Replay:
    """Hit rates, bytes and seconds of a trace with given memory, slots and costs."""

    token_s: np.ndarray  # ``[T]``: seconds of each token that counts
    app_hit_rate: float  # share of the needed experts that were in a slot
    page_hit_rate: float  # share of the reads that the page cache served; nan: no reads
    copied_per_token: float  # bytes from the page cache
    read_per_token: float  # bytes from the disk
    # An average token's seconds, divided into ``fixed``, ``experts``, ``copies`` (from the page
    # cache) and ``disk``; ``hidden`` (0 or less) has the seconds that overlap saved.
    parts_s: dict
    page_nbytes: float  # the memory that was left for experts in the page cache

    @property
    def mean_s(self) -> float:
        """Seconds of an average token."""
        return float(self.token_s.mean())

    @property
    def tok_s(self) -> float:
        return 1 / self.mean_s


def replay(
    trace: Trace,
    memory_nbytes: float,
    slots: int,
    policy: str = "lru",
    *,
    expert_nbytes: int,
    costs: Costs,
    slot_nbytes: int | None = None,
    other_nbytes: int = 0,
    skip: int = 0,
    direct: bool = False,
) -> Replay:
    """Replay a trace's decoded tokens through ``slots`` in each layer over a page cache.

    The process and its page cache share ``memory_nbytes`` (inf: no limit). The process takes
    ``other_nbytes`` beside its slots. A slot takes ``slot_nbytes`` (None: ``expert_nbytes``, as
    on disk). The first ``skip`` tokens fill the empty caches and are not counted. Policy ``none``
    keeps no expert, but needs memory for K slots. ``direct`` reads bypass the page cache.
    """
    experts = trace.decode.experts
    T, L, K = experts.shape
    E = trace.num_experts
    if not 0 <= skip < T:
        raise ValueError(
            f"replay: expected fewer tokens to skip than the {T} decoded ones of the trace, "
            f"got {skip}."
        )
    num_slots = L * (K if policy == "none" else min(slots, E))
    slots_nbytes = num_slots * (slot_nbytes or expert_nbytes)
    page_nbytes = memory_nbytes - slots_nbytes - other_nbytes
    if page_nbytes < 0:
        raise ValueError(
            f"replay: {slots} slots in each of {L} layers take {slots_nbytes / 1e6:.0f} MB and "
            f"the rest {other_nbytes / 1e6:.0f} MB, of {memory_nbytes / 1e6:.0f} MB: take fewer "
            "slots or more memory."
        )
    missed = _missed(trace, slots, policy)
    units = (experts + np.arange(L, dtype=np.int64)[:, None] * E)[missed]
    if direct:
        costs, page_nbytes = costs.past_the_page_cache(), 0.0
    found = cached(units, L * E, page_nbytes, expert_nbytes)
    layer = np.broadcast_to(np.arange(T * L).reshape(T, L, 1), experts.shape)[missed]

    def count(weights=None):
        return np.bincount(layer, weights, minlength=T * L).reshape(T, L)[skip:]

    asked, cold = count(), count(~found)
    warm = asked - cold
    experts_s, n = K * costs.expert_s, T - skip
    copies_s = warm * (expert_nbytes * costs.warm_s_per_byte)
    copies_s += costs.warm_call_s * ((warm > 0) & (cold == 0))
    disk_s = cold * (expert_nbytes * costs.cold_s_per_byte) + costs.cold_call_s * (cold > 0)
    overlaps = asked >= max(1, PART_NBYTES // expert_nbytes)  # as ``Residency`` decides
    hidden_s = costs.overlap * overlaps * np.minimum(copies_s + disk_s, experts_s)
    return Replay(
        token_s=costs.fixed_s + L * experts_s + (copies_s + disk_s - hidden_s).sum(1),
        app_hit_rate=1 - asked.sum() / (n * L * K),
        page_hit_rate=warm.sum() / asked.sum() if asked.sum() else float("nan"),
        copied_per_token=warm.sum() * expert_nbytes / n,
        read_per_token=cold.sum() * expert_nbytes / n,
        parts_s={
            "fixed": costs.fixed_s,
            "experts": L * experts_s,
            "copies": copies_s.sum() / n,
            "disk": disk_s.sum() / n,
            "hidden": -hidden_s.sum() / n,
        },
        page_nbytes=page_nbytes,
    )


@lru_cache(maxsize=64)  # misses depend neither on the memory nor on the costs
def _missed(trace, slots, policy):
    return ~held(trace.decode.experts, trace.num_experts, slots, policy)


def cached(units: np.ndarray, num_units: int, nbytes: float, unit_nbytes: int = 1) -> np.ndarray:
    """Return which reads hit a page cache of ``nbytes`` that is empty at first.

    ``units`` ``[N]`` are in the order of reading; a unit is one layer's expert. The replay follows
    Linux (6.x, without multi-generational LRU and read-ahead) for pages that are only read. A new
    page goes to the head of the inactive list. A page that is read again there goes to the active
    list. The inactive list's tail is reclaimed. The active list's tail moves to the inactive list
    while the active list is more than r times as long as the inactive one. r is 1 for less than
    1 GiB, and sqrt(10 n) for n GiB. A reclaimed page that is read again goes to the active list if
    no more reclaims and activations followed its reclaim than the active list has pages.
    """
    capacity = int(min(nbytes / unit_nbytes, num_units))
    found = np.full(len(units), capacity > 0)
    if not capacity:
        return found
    ratio = max(1, isqrt(10 * (int(min(nbytes, num_units * unit_nbytes)) >> 30)))
    # Each list maps a unit to whether it was referenced; the tail comes first.
    inactive, active = OrderedDict(), OrderedDict()
    # ``age`` counts reclaims and activations; ``left`` has ``age`` at each unit's last reclaim.
    age, left, missed = 0, {}, []
    for i, u in enumerate(units.tolist()):
        if u in active:
            active[u] = True
            continue
        if u in inactive:
            if inactive[u]:
                del inactive[u]
                active[u] = False
                age += 1
            else:
                inactive[u] = True
            continue
        missed.append(i)
        if u in left and age - left[u] <= len(active):
            active[u] = True
            age += 1
        else:
            inactive[u] = True
        if len(inactive) + len(active) > capacity:
            while len(inactive) * ratio < len(active):
                inactive.update([active.popitem(last=False)])
            reclaimed, _ = inactive.popitem(last=False)
            left[reclaimed] = age
            age += 1
    found[missed] = False
    return found

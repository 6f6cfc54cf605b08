"""A trace replayed through two caches: the application's slots, and the page cache below them.

Which of them should have the memory is the question of notebook 03. ``replay`` answers it for any
memory, policy and cost in a fraction of a second.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np

from ..streaming.trace import Trace
from .costs import Costs
from .eviction import held

PAGES = ("linux", "lru")


@dataclass(frozen=True)
class Replay:
    """Hit rates, bytes and seconds of a trace with given memory, slots and costs."""

    token_s: np.ndarray  # ``[T]``, each token that counts
    app_hit_rate: float  # share of the needed experts that were in a slot
    page_hit_rate: float  # share of the experts read that were in the page cache; nan: none read
    copied_per_token: float  # bytes from the page cache
    read_per_token: float  # bytes from the disk, read-ahead included
    # Seconds of an average token by ``fixed``, ``experts``, ``copies`` (from the page cache) and
    # ``disk``; ``hidden`` (not positive) is what overlap saved.
    parts_s: dict
    page_nbytes: float  # the memory that was left for experts in the page cache

    @property
    def mean_s(self) -> float:
        """Seconds of an average token."""
        return float(self.token_s.mean())

    @property
    def tok_s(self) -> float:
        """Tokens per second."""
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
    pages: str = "linux",
    read_ahead: int = 0,
    direct: bool = False,
) -> Replay:
    """Replay a trace's decoded tokens through ``slots`` in each layer over a page cache.

    ``memory_nbytes`` is for the process and its page cache (inf: no limit); ``other_nbytes`` of it
    are the process's beside slots. A slot takes ``slot_nbytes`` (None: ``expert_nbytes``, as on
    disk). The first ``skip`` tokens fill the empty caches and do not count. With policy ``none``
    slots count as K. ``direct`` reads go past the page cache, which then holds nothing. ``pages``
    and ``read_ahead`` are those of ``cached``.
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
        costs, page_nbytes, read_ahead = costs.past_the_page_cache(), 0.0, 0
    found, brought = cached(units, L * E, page_nbytes, expert_nbytes, pages, read_ahead, E)
    layer = np.broadcast_to(np.arange(T * L).reshape(T, L, 1), experts.shape)[missed]

    def count(weights=None):
        return np.bincount(layer, weights, minlength=T * L).reshape(T, L)[skip:]

    asked, cold, extra = count(), count(~found), count(brought)
    warm = asked - cold
    copies_s = costs.copies_s(warm, cold, expert_nbytes)
    disk_s = costs.disk_s(cold, extra, expert_nbytes)
    experts_s = K * costs.expert_s
    hidden_s = costs.hidden_s(copies_s + disk_s, experts_s)
    n = T - skip
    return Replay(
        token_s=costs.fixed_s + L * experts_s + (copies_s + disk_s - hidden_s).sum(1),
        app_hit_rate=1 - asked.sum() / (n * L * K),
        page_hit_rate=warm.sum() / asked.sum() if asked.sum() else float("nan"),
        copied_per_token=warm.sum() * expert_nbytes / n,
        read_per_token=(cold + extra).sum() * expert_nbytes / n,
        parts_s={
            "fixed": costs.fixed_s,
            "experts": L * experts_s,
            "copies": copies_s.sum() / n,
            "disk": disk_s.sum() / n,
            "hidden": -hidden_s.sum() / n,
        },
        page_nbytes=page_nbytes,
    )


@lru_cache(maxsize=32)  # misses depend neither on the memory nor on the costs
def _missed(trace, slots, policy):
    return ~held(trace.decode.experts, trace.num_experts, slots, policy)


def cached(
    units: np.ndarray,
    num_units: int,
    nbytes: float,
    unit_nbytes: int = 1,
    pages: str = "linux",
    read_ahead: int = 0,
    row: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Which reads an empty page cache of ``nbytes`` serves; a unit is one expert of one layer.

    ``linux`` follows the kernel (6.x, without multi-generational LRU) for pages that are only
    read. A new page goes to the head of the inactive list. Read again there, it moves to the
    active list; read while active, it stays where it is. The tail of the inactive list is
    reclaimed. While the active list is longer than the inactive one (3 times as long from 1 GiB
    on, sqrt(10 n) times from n GiB on), its tail moves to the inactive list. A page that comes back
    within as many reclaims and activations as the active list is long goes to the active list at
    once. Units come and go whole, where the kernel reclaims page by page.

    With ``read_ahead``, a missing unit behind r cached ones in the file looks like the next one of
    a sequential stream, and the r units behind it are read too. The first of these that is used
    makes the kernel read twice as many, behind the last cached one. This is for units that do not
    begin on a page, as in safetensors files. ``read_ahead`` is the most units that Linux reads
    ahead: ``read_ahead_kb`` over the largest contiguous part of an expert. It is 0 if the reader
    turned it off or less than one unit fits. ``row`` units lie one after another in the file: E
    (None: all).

    For units ``[N]`` below ``num_units``, in the order of reading, it gives whether each was cached
    and how many more were read with it, ``[N]`` both. ``pages="lru"``: one list, of which the
    least recently read unit is reclaimed.
    """
    if pages not in PAGES:
        raise ValueError(f"pages: expected one of {', '.join(PAGES)}, got {pages!r}.")
    found, brought = np.zeros(len(units), bool), np.zeros(len(units), np.int64)
    capacity = nbytes / unit_nbytes
    if not len(units) or capacity < 1:
        return found, brought
    if not read_ahead and capacity >= np.count_nonzero(np.bincount(units)):
        first = np.unique(units, return_index=True)[1]
        found[:] = True
        found[first] = False
        return found, brought
    if pages == "lru":
        _one_list(units.tolist(), capacity, found)
        return found, brought
    ratio = max(1, isqrt(10 * (int(min(nbytes, num_units * unit_nbytes)) >> 30)))
    _two_lists(
        units.tolist(),
        num_units,
        min(capacity, num_units),
        ratio,
        read_ahead,
        row or num_units,
        found,
        brought,
    )
    return found, brought


def _one_list(units, capacity, found):
    order = OrderedDict()
    for i, u in enumerate(units):
        if u in order:
            order.move_to_end(u)
            found[i] = True
        else:
            order[u] = None
            if len(order) > capacity:
                order.popitem(last=False)


def _two_lists(units, num_units, capacity, ratio, read_ahead, row, found, brought):
    # A unit's state is 0 absent, 1 inactive, 2 inactive and referenced, 3 active, 4 active and
    # referenced. The inactive list is a log from ``oldest`` on, in which an entry counts if it is
    # its unit's last. Every line runs 100,000 times, so there are no calls.
    state, place, left = [0] * num_units, [-1] * num_units, [-num_units] * num_units
    log, active, missed = [], deque(), []
    marked = bytearray(num_units)
    oldest = total = num_inactive = num_active = 0
    age = 0  # reclaims and activations so far; ``left``: the age when a unit was reclaimed
    capacity, i = int(capacity), -1
    for u in units:
        i += 1
        s = state[u]
        if s == 4 and not read_ahead:
            continue
        more = _read_with(u, state, marked, read_ahead, row) if read_ahead else ()
        if s:
            if s == 2:
                place[u] = -1
                num_inactive -= 1
                active.append(u)
                num_active += 1
                age += 1
            if s < 4:
                state[u] = s + 1
            if not more:
                continue
            new = more
        else:
            missed.append(i)
            new = (u, *more)
        if more:
            brought[i] = len(more)
        for v in new:
            total += 1
            if age - left[v] <= num_active:
                active.append(v)
                num_active += 1
                age += 1
                state[v] = 3
            else:
                place[v] = len(log)
                log.append(v)
                num_inactive += 1
                state[v] = 1
        if not s:
            state[u] += 1  # referenced; nobody has read the others yet
        while total > capacity:
            total -= 1
            while num_inactive * ratio < num_active:
                v = active.popleft()
                num_active -= 1
                state[v] -= 2
                place[v] = len(log)
                log.append(v)
                num_inactive += 1
            while place[v := log[oldest]] != oldest:
                oldest += 1
            oldest += 1
            num_inactive -= 1
            state[v] = marked[v] = 0
            left[v] = age
            age += 1
    found[:] = True
    found[np.array(missed, np.intp)] = False


def _read_with(u, state, marked, most, row):
    # This gives the units that read-ahead brings with u. A mark lies where a read-ahead ends, on
    # the page that two units share.
    first = u - u % row
    end = first + row
    if marked[u]:
        marked[u] = 0
        gap = u
        while gap < end and gap - u < most and state[gap]:
            gap += 1
        if gap == end or gap - u == most:
            return ()
        size = min(most, 2 * (gap - u + 1))
        last = min(end, gap + size)
        mark = gap
        if gap == u:  # this read goes through the new mark too
            mark, last = last, min(end, last + min(most, 2 * size))
    elif state[u]:
        return ()
    else:
        gap = u - 1
        while gap >= first and u - gap <= most and state[gap]:
            gap -= 1
        run = u - gap - 1
        if not run:
            return ()
        mark = last = min(end, u + min(run, most - 1) + 1)
    if mark < end and not state[mark]:
        marked[mark] = 1
    return [v for v in range(u + 1, last) if not state[v]]

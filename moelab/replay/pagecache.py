"""A trace replayed through two caches: the application's slots, and the operating system's page cache below them.

Which of them should have the memory is the question of notebook 03. ``replay`` answers it for any memory, policy and
cost in a fraction of a second; ``measure_costs`` says what the costs are on this machine.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np

from ..streaming.layers import OVERLAP_S
from ..streaming.slots import POLICIES as ENGINE
from ..streaming.slots import hottest
from .costs import Costs, measure_costs
from .locality import popularity

__all__ = ["POLICIES", "Costs", "Replay", "cached", "held", "measure_costs", "pin", "replay"]

POLICIES = (*ENGINE, "fifo", "s3-fifo", "belady", "none")
_SCORED = (*ENGINE, "fifo", "belady")  # those of ``_scored``, with pinned experts or without
PAGES = ("linux", "lru")


@dataclass(frozen=True)
class Replay:
    """What a trace would have done.

    Attributes:
        token_s (np.ndarray): ``[T]`` seconds of each token counted.
        app_hit_rate (float): Share of the experts needed that were in a slot.
        page_hit_rate (float): Share of the experts read that were in the page cache; nan if none was read.
        copied_per_token (float): Bytes that came out of the page cache.
        read_per_token (float): Bytes that came from the disk, read-ahead included.
        parts_s (dict[str, float]): Seconds of an average token by ``fixed``, ``experts``, ``copies`` (from the page cache) and
            ``disk``; ``hidden`` (not positive) is what overlap saved.
        page_nbytes (float): What the memory left for the page cache.
    """

    token_s: np.ndarray
    app_hit_rate: float
    page_hit_rate: float
    copied_per_token: float
    read_per_token: float
    parts_s: dict
    page_nbytes: float

    @property
    def tok_s(self):
        """Tokens per second, from the mean of ``token_s``."""
        return float(1 / self.token_s.mean())


def replay(
    trace, memory_nbytes, slots, policy="lru", *, expert_nbytes, costs, slot_nbytes=None, other_nbytes=0, skip=0,
    pages="linux", ahead=0, pinned=(),
):  # fmt: skip
    """Replay a trace's decoded tokens through slots over a page cache.

    Args:
        trace (Trace): ``[T, L, K]``.
        memory_nbytes (float): What the process and its page cache may take; ``inf``: no limit.
        slots (int): S, experts held in each layer; at least K.
        policy (str): Which leaves first: ``lru``, ``lfu`` (both exactly as ``SlotTable`` does it), ``fifo``, ``s3-fifo``,
            ``belady`` (the one needed last: no policy can hit more), or ``none``: nothing is held, every expert is read each time,
            as ``buffers`` does, and ``slots`` counts as K.
        expert_nbytes (int): What a miss reads: one expert, all projections.
        costs (Costs): From ``measure_costs``, or made up.
        slot_nbytes (int, optional): What an expert takes in its slot. Default: as much as on disk.
        other_nbytes (int): What else the process holds: backbone, caches, the interpreter.
        skip (int): Tokens at the start that fill the caches, empty at first, and are not counted.
        pages (str): As for ``cached``.
        ahead (int): As for ``cached``.
        pinned (tuple[tuple[int]]): As for ``held``; they take their bytes beside the S slots.

    Returns:
        Replay: Hit rates, bytes and seconds.

    Raises:
        ValueError: If the slots and the rest do not fit in the memory, or an argument is not one of the above.
    """
    experts = trace.decode.experts
    T, L, K = experts.shape
    E = trace.num_experts
    if not 0 <= skip < T:
        raise ValueError(
            f"replay: expected fewer tokens to skip than the {T} decoded ones of the trace, got {skip}."
        )
    num_slots = L * (K if policy == "none" else min(slots, E)) + sum(map(len, pinned))
    slots_nbytes = num_slots * (slot_nbytes or expert_nbytes)
    page_nbytes = memory_nbytes - slots_nbytes - other_nbytes
    if page_nbytes < 0:
        raise ValueError(
            f"replay: {slots} slots in each of {L} layers take {slots_nbytes / 1e6:.0f} MB and the rest {other_nbytes / 1e6:.0f} MB, "
            f"of {memory_nbytes / 1e6:.0f} MB: take fewer slots or more memory."
        )
    missed = _missed(trace, slots, policy, pinned)
    units = (experts + np.arange(L, dtype=np.int64)[:, None] * E)[missed]
    found, brought = cached(units, L * E, page_nbytes, expert_nbytes, pages, ahead, E)
    layer = np.broadcast_to(np.arange(T * L).reshape(T, L, 1), experts.shape)[missed]

    def count(mask=None):
        return np.bincount(layer, mask, minlength=T * L).reshape(T, L)[skip:]

    asked, cold, extra = count(), count(~found), count(brought)
    warm = asked - cold
    copies_s = warm * (expert_nbytes * costs.warm_s_per_byte) + costs.warm_call_s * (
        (warm > 0) & (cold == 0)
    )
    disk_s = (cold + extra) * (expert_nbytes * costs.cold_s_per_byte) + costs.cold_call_s * (
        cold > 0
    )
    reads_s, experts_s = copies_s + disk_s, K * costs.expert_s
    hidden_s = np.where(reads_s >= OVERLAP_S, -costs.overlap * np.minimum(reads_s, experts_s), 0.0)
    token_s = costs.fixed_s + L * experts_s + (reads_s + hidden_s).sum(1)
    n = T - skip
    return Replay(
        token_s=token_s,
        app_hit_rate=1 - asked.sum() / (n * L * K),
        page_hit_rate=warm.sum() / asked.sum() if asked.sum() else float("nan"),
        copied_per_token=warm.sum() * expert_nbytes / n,
        read_per_token=(cold + extra).sum() * expert_nbytes / n,
        parts_s={
            "fixed": costs.fixed_s,
            "experts": L * experts_s,
            "copies": copies_s.sum() / n,
            "disk": disk_s.sum() / n,
            "hidden": hidden_s.sum() / n,
        },
        page_nbytes=page_nbytes,
    )


@lru_cache(maxsize=32)  # of a trace, whatever the memory and the costs
def _missed(trace, slots, policy, pinned):
    return ~held(trace.decode.experts, trace.num_experts, slots, policy, pinned)


def pin(trace, nbytes, slots, slot_nbytes):
    """The experts that ``StreamConfig(pinned_nbytes=nbytes)`` would pin by a trace.

    Args:
        trace (Trace): Its decoded tokens count.
        nbytes (int): The budget.
        slots (int): S, beside them.
        slot_nbytes (int): What an expert takes in its slot.

    Returns:
        tuple[tuple[int]]: Of each layer, for ``replay``.
    """
    L, E = trace.experts.shape[1], trace.num_experts
    return tuple(
        map(
            tuple,
            hottest(popularity(trace.decode), nbytes, [slot_nbytes] * L, [max(0, E - slots)] * L),
        )
    )


def held(experts, num_experts, slots, policy="lru", pinned=()):
    """Which experts are in a slot when needed.

    A layer's K experts are needed together: none of them leaves for another.

    Args:
        experts (np.ndarray): ``[T, L, K]``, distinct within a token.
        num_experts (int): E.
        slots (int): S, at least K.
        policy (str): One of ``POLICIES``; with pinned experts not ``s3-fifo`` or ``none``.
        pinned (tuple[tuple[int]]): Of each layer, experts that are in slots of their own from the beginning and never leave.

    Returns:
        np.ndarray: ``[T, L, K]`` of bool.

    Raises:
        ValueError: If there are too few slots, no such policy, or a token names an expert twice.
    """
    T, L, K = experts.shape
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}.")
    if pinned and policy not in _SCORED:
        raise ValueError(
            f"pinned: expected a policy of {', '.join(_SCORED)} beside it, got {policy!r}."
        )
    if policy == "none":
        return np.zeros((T, L, K), bool)
    if slots < K:
        raise ValueError(f"slots: expected at least {K} (the experts per token), got {slots}.")
    if not np.diff(np.sort(experts, axis=-1), axis=-1).all():
        raise ValueError(
            "held: expected distinct experts in each token and layer, got one twice; a replay of such a family is not supported."
        )
    slots = min(slots, num_experts)
    if policy == "s3-fifo":
        return np.stack(
            [_s3_fifo(rows, num_experts, slots) for rows in experts.transpose(1, 0, 2)], axis=1
        )
    return _scored(experts, num_experts, slots, policy, pinned)


def _s3_fifo(rows, E, slots):
    # One layer. A tenth of the slots is for newcomers; who was used again there moves on to the main queue, who was not leaves and
    # is remembered as a ghost, and goes straight to the main queue when it comes back (Yang et al., SOSP 2023). In plain lists and
    # without calls: a replay of 1,000 tokens and 48 layers (K = 8, E = 128) takes 80 ms with 96 slots, 190 with 16, 205 with K.
    room, held = max(1, slots // 10), 0
    remembered = slots - room
    small, main, ghost = (
        deque(),
        deque(),
        [],
    )  # a ghost counts from ``oldest`` on, where its place is
    place, ghosts, oldest = [-1] * E, 0, 0
    uses, needed = [-1] * E, [-1] * E  # -1: not held; the last token that needed it
    absent, counts = [], []
    for t, need in enumerate(rows.tolist()):
        missing = []
        for e in need:
            needed[e] = t
            u = uses[e]
            if u < 0:
                missing.append(e)
            elif u < 3:
                uses[e] = u + 1
        absent += missing
        counts.append(len(missing))
        for e in missing:
            if held < slots:
                held += 1
            else:
                queue, passed = small if len(small) >= room else main, 0
                while True:
                    v = queue.popleft()
                    u = uses[v]
                    if needed[v] == t:
                        queue.append(v)
                        passed += 1
                    elif queue is small:
                        if u < 2:
                            uses[v] = -1
                            place[v] = len(ghost)
                            ghost.append(v)
                            if ghosts < remembered:
                                ghosts += 1
                            else:
                                while place[v := ghost[oldest]] != oldest:
                                    oldest += 1
                                place[v] = -1
                            break
                        uses[v] = 0
                        main.append(v)
                    elif u:
                        uses[v] = u - 1
                        main.append(v)
                        passed = 0
                    else:
                        uses[v] = -1
                        break
                    if passed == len(queue):  # it has nothing but needed experts
                        queue, passed = main if queue is small else small, 0
            if place[e] >= 0:
                place[e] = -1
                ghosts -= 1
                main.append(e)
            else:
                small.append(e)
            uses[e] = 0
    at = np.arange(len(rows))
    hit = np.ones((len(rows), E), bool)
    hit[np.repeat(at, counts), absent] = False
    return hit[at[:, None], rows]


def _scored(experts, E, slots, policy, pinned=()):
    # All layers at once, token by token: of the experts held and not needed, those with the lowest scores leave.
    if policy not in _SCORED:
        raise ValueError(f"policy: expected one of {', '.join(_SCORED)}, got {policy!r}.")
    T, L, K = experts.shape
    rows, places = np.arange(L)[:, None], np.arange(K)
    slot_of = np.full((L, E + 1), -1)  # the last column is of nobody, whom empty slots hold
    width = slots + max(map(len, pinned), default=0)  # the last are of the pinned
    holds = np.full((L, width), E)
    score = np.full((L, width), -1.0 if policy != "belady" else -np.inf)
    score[:, slots:] = np.inf
    for layer, its in enumerate(pinned):
        slot_of[layer, list(its)] = np.arange(slots, slots + len(its))
    uses = np.zeros((L, E), np.int64)
    following = _next_use(experts, E) if policy == "belady" else None
    hit = np.empty((T, L, K), bool)
    for t in range(T):
        need = experts[t].astype(np.intp)
        slot = slot_of[rows, need]
        found = hit[t] = slot >= 0
        missing = K - found.sum(1)
        most = missing.max()
        if most:
            layer, k = np.nonzero(found)
            leaving = score.copy()
            leaving[layer, slot[layer, k]] = np.inf  # needed now
            if most < width:
                lowest = np.argpartition(leaving, most - 1, axis=1)[:, :most]
            else:
                lowest = np.broadcast_to(np.arange(slots), (L, slots))
            lowest = np.take_along_axis(
                lowest, np.take_along_axis(leaving, lowest, 1).argsort(1), 1
            )
            layer, k = np.nonzero(~found)
            chosen = lowest[
                np.arange(most) < missing[:, None]
            ]  # in the order of layers, as ``layer`` is
            slot_of[layer, holds[layer, chosen]] = -1
            e = need[layer, k]
            slot_of[layer, e] = slot[layer, k] = chosen
            holds[layer, chosen] = e
        if policy == "belady":
            score[rows, slot] = -following[t]
            score[:, slots:] = np.inf
            continue
        # The least recent leaves first; of one token's, those that were read after those that were there.
        now = (2 * t + ~found) * float(K) + places
        if policy == "lfu":
            uses[rows, need] += 1
            now += uses[rows, need] * 2.0**32
        elif policy == "fifo":
            now = np.where(found, score[rows, slot], now)
        score[rows, slot] = now
        score[:, slots:] = np.inf
    return hit


def _next_use(experts, E):
    """``[T, L, K]``: the token that needs the same expert next; T + its number if none does, so that no two are alike."""
    T, L, K = experts.shape
    following, at = np.empty((T, L, K)), np.arange(T, T + E, dtype=float)[None].repeat(L, 0)
    rows = np.arange(L)[:, None]
    for t in range(T - 1, -1, -1):
        need = experts[t].astype(np.intp)
        following[t] = at[rows, need]
        at[rows, need] = t
    return following


def cached(units, num_units, nbytes, unit_nbytes=1, pages="linux", ahead=0, row=None):
    """Which reads the page cache serves. It is empty at first; a unit is one expert of one layer.

    ``linux`` follows the kernel (6.x, without multi-generational LRU) for pages that are only read: a page comes to the head of the
    inactive list; read again there, it moves to the active one; read while active, it stays where it is. The tail of the
    inactive list is reclaimed. While the active list is longer than the inactive one (3 times so from 1 GiB on, sqrt(10 n) times
    from n GiB on), its tail goes back to the inactive one. A page that comes back within as many reclaims and activations as the
    active list is long goes to the active list at once. Units come and go whole, where the kernel reclaims page by page.

    Args:
        units (np.ndarray): ``[N]``, in the order of reading.
        num_units (int): How many there are; units are below it.
        nbytes (float): What the page cache holds.
        unit_nbytes (int): The bytes of one.
        pages (str): ``linux`` or ``lru``, one list of the least recently read.
        ahead (int): The most units that Linux reads ahead: ``read_ahead_kb`` over the largest contiguous part of an expert; 0 where
            the reader advises against it (``POSIX_FADV_RANDOM``), or where less than one fits. A missing unit after r in a row that
            are cached is taken for the next of a stream, and the r after it come too; the first of a read-ahead that is read brings
            twice as many after the last cached one. For units that do not begin on a page, as in safetensors files. On Linux 6.18 with
            8 MiB of read-ahead it was 2 to 12% off the kernel's bytes with half of the file cached or less, 20 to 29% low at 73%.
        row (int, optional): Units that lie one after another in the file: E. Default: all.

    Returns:
        tuple[np.ndarray, np.ndarray]: ``[N]`` of bool, whether it was there, and of int, how many more units came with it.
    """
    if pages not in PAGES:
        raise ValueError(f"pages: expected one of {', '.join(PAGES)}, got {pages!r}.")
    found, brought = np.zeros(len(units), bool), np.zeros(len(units), np.int64)
    capacity = nbytes / unit_nbytes
    if not len(units) or capacity < 1:
        return found, brought
    if not ahead and capacity >= np.count_nonzero(np.bincount(units)):
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
        ahead,
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


def _two_lists(units, num_units, capacity, ratio, ahead, row, found, brought):
    # A unit's state is 0 absent, 1 inactive, 2 inactive and referenced, 3 active, 4 active and referenced. The inactive list is a
    # log from ``oldest`` on, in which an entry counts if it is its unit's last. Every line runs 100,000 times: hence no calls.
    state, place, left = [0] * num_units, [-1] * num_units, [-num_units] * num_units
    log, active, missed = [], deque(), []
    marked = bytearray(num_units)
    oldest = total = num_inactive = num_active = 0
    age = 0  # reclaims and activations so far; ``left``: the age when a unit was reclaimed
    capacity, i = int(capacity), -1
    for u in units:
        i += 1
        s = state[u]
        if s == 4 and not ahead:
            continue
        more = ahead and _read_ahead(u, state, marked, ahead, row)
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
        else:
            missed.append(i)
            total += 1
            if age - left[u] <= num_active:
                active.append(u)
                num_active += 1
                age += 1
                state[u] = 4
            else:
                place[u] = len(log)
                log.append(u)
                num_inactive += 1
                state[u] = 2
        if more:
            brought[i] = len(more)
            total += len(more)
            for v in more:  # as above, but nobody has read them yet
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


def _read_ahead(u, state, marked, most, row):
    # What comes with the reading of u besides u. A mark lies where a read-ahead ends, on the page that two units share.
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

"""Which experts a cache of slots holds, by eviction policy.

A policy of the engine is a line of ``EVICTION`` in ``streaming/config.py``, which is read here.
Another one is a line of ``SCORES``.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from ..streaming.residency.table import EVICTION, LARGEST


class Uses(NamedTuple):
    """The uses of one token's experts, on which a score may depend; each is ``[L, K]``."""

    order: np.ndarray  # grows from use to use; within a token, hits come before misses
    hit: np.ndarray  # whether the expert was in a slot
    score: np.ndarray  # the slot's score so far; meaningless for a miss
    next: np.ndarray  # the token that needs the expert next; beyond the last if none does


# Policies that do not follow from ``EVICTION``: the score of an expert from its use on. The expert
# with the lowest score is evicted first.
SCORES = {
    "fifo": lambda use: np.where(use.hit, use.score, use.order),
    "belady": lambda use: -use.next,  # knows the future: no policy can hit more
}


def policies() -> tuple[str, ...]:
    """The engine's eviction policies, and the replay's own."""
    # S3-FIFO is three queues and no score; ``none`` holds nothing, as the mode ``buffers``.
    return (*(EVICTION | SCORES), "s3-fifo", "none")


def held(experts: np.ndarray, num_experts: int, slots: int, policy: str = "lru") -> np.ndarray:
    """Whether each of the experts ``[T, L, K]`` is in a slot when it is needed: ``[T, L, K]``.

    A token's experts are distinct and needed together: none of them is evicted for another.
    """
    K = experts.shape[-1]
    if policy not in policies():
        raise ValueError(f"policy: expected one of {', '.join(policies())}, got {policy!r}.")
    if policy == "none":
        return np.zeros(experts.shape, bool)
    if slots < K:
        raise ValueError(f"slots: expected at least {K} (the experts per token), got {slots}.")
    if not np.diff(np.sort(experts, axis=-1), axis=-1).all():
        raise ValueError(
            "held: expected distinct experts in each token and layer, got one twice; "
            "a replay of such a family is not supported."
        )
    slots = min(slots, num_experts)
    if policy == "s3-fifo":
        layers = experts.transpose(1, 0, 2)
        return np.stack([_s3_fifo(rows, slots) for rows in layers], axis=1)
    return _by_score(experts, num_experts, slots, policy)


def _by_score(experts, E, slots, policy):
    # This computes all layers at once, token by token. Of the experts that are held and not needed,
    # those with the lowest scores are evicted. A policy that counts uses evicts those whose uses
    # count least, and of equal ones those with the lowest scores.
    score_of, decay = SCORES.get(policy, lambda use: use.order), EVICTION.get(policy, 0)
    T, L, K = experts.shape
    rows, places = np.arange(L)[:, None], np.arange(K)
    slot_of = np.full((L, E + 1), -1)  # expert id E marks an empty slot
    holds = np.full((L, slots), E)
    score = np.full((L, slots), -np.inf)
    counts, one, next_use = np.zeros((L, E + 1)), 1.0, _next_use(experts, E)
    hit = np.empty((T, L, K), bool)
    for t in range(T):
        need = experts[t].astype(np.intp)
        if decay:  # as ``SlotTable`` counts
            one /= decay
            if one > LARGEST:
                one, counts = one / LARGEST, counts / LARGEST
            counts[rows, need] += one
        slot = slot_of[rows, need]
        found = hit[t] = slot >= 0
        missing = K - found.sum(1)
        most = missing.max()
        if most:
            layer, k = np.nonzero(found)
            candidates = score.copy()
            candidates[layer, slot[layer, k]] = np.inf  # needed now
            if decay:
                by_count = np.where(np.isinf(candidates), candidates, counts[rows, holds])
                lowest = np.lexsort((candidates, by_count))[:, :most]
            elif most < slots:
                lowest = np.argpartition(candidates, most - 1, axis=1)[:, :most]
            else:
                lowest = np.broadcast_to(np.arange(slots), (L, slots))
            if not decay:
                ascending = np.take_along_axis(candidates, lowest, 1).argsort(1)
                lowest = np.take_along_axis(lowest, ascending, 1)
            layer, k = np.nonzero(~found)
            evicted = lowest[np.arange(most) < missing[:, None]]  # by layer, as ``layer`` is
            slot_of[layer, holds[layer, evicted]] = -1
            e = need[layer, k]
            slot_of[layer, e] = slot[layer, k] = evicted
            holds[layer, evicted] = e
        order = (2 * t + ~found) * float(K) + places
        use = Uses(order, found, score[rows, slot], next_use[t])
        score[rows, slot] = score_of(use)
    return hit


def _next_use(experts, E):
    """``[T, L, K]``: the token that needs the same expert next, or T + its number if none does."""
    T, L, K = experts.shape
    which = (experts + np.arange(L, dtype=np.int64)[:, None] * E).ravel()
    uses = np.argsort(which, kind="stable")  # expert by expert, each in the order of time
    token = np.arange(which.size) // (L * K)
    following = np.empty(which.size)
    following[uses[:-1]] = token[uses[1:]]
    last = np.append(which[uses[1:]] != which[uses[:-1]], True)
    following[uses[last]] = T + which[uses[last]] % E
    return following.reshape(T, L, K)


def _s3_fifo(rows, slots):
    """Replay one layer's tokens by S3-FIFO (Yang et al., SOSP 2023).

    A tenth of the slots is a queue of new experts. Those used again move to the main queue; the
    others are evicted and remembered as ghosts, which go to the main queue when they come back.
    """
    room = max(1, slots // 10)
    small, main, ghosts, uses = deque(), deque(), {}, {}  # ``uses`` has the experts that are held

    def evict(queue, need):
        passed = 0  # experts that are needed now, one after the other
        while passed < len(queue):
            e = queue.popleft()
            if e in need:
                queue.append(e)
                passed += 1
            elif queue is main and uses[e]:
                uses[e] -= 1
                main.append(e)
                passed = 0
            elif queue is small and uses[e] > 1:
                uses[e] = 0
                main.append(e)
            else:
                del uses[e]
                if queue is small:
                    ghosts[e] = True
                    if len(ghosts) > slots - room:
                        del ghosts[next(iter(ghosts))]
                return True
        return False

    hit = np.empty(rows.shape, bool)
    for t, need in enumerate(rows.tolist()):
        hit[t] = [e in uses for e in need]
        missing = [e for e in need if e not in uses]
        uses |= {e: min(3, uses[e] + 1) for e in need if e in uses}
        for e in missing:
            if len(uses) == slots:
                first, second = (small, main) if len(small) >= room else (main, small)
                evict(first, need) or evict(second, need)
            (main if ghosts.pop(e, False) else small).append(e)
            uses[e] = 0
    return hit

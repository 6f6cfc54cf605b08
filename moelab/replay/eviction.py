"""Replay which experts the slots hold, by the engine's policies (``SlotTable``) or by others."""

from collections import deque
from heapq import nlargest

import numpy as np

from ..streaming.residency.table import EVICTION, SlotTable


class _Belady(SlotTable):
    """A slot table that knows all ``rows [T, K]``; evicts the experts whose next use is latest."""

    def __init__(self, num_slots, rows):
        super().__init__(num_slots)
        self._uses = {}  # by expert: the tokens that will need it, the last first
        for t in reversed(range(len(rows))):
            for e in rows[t]:
                self._uses.setdefault(e, [len(rows)]).append(t)

    def choose(self, experts):
        for e in experts:
            self._uses[e].pop()
        return super().choose(experts)

    def _victims(self, needed, num):
        candidates = (e for e in self.slot_of if e not in needed)
        return nlargest(num, candidates, key=lambda e: self._uses[e][-1])


def policies() -> tuple[str, ...]:
    """The engine's eviction policies, and the replay's own."""
    # S3-FIFO has queues, not a slot table; ``none`` holds no expert, like the mode ``buffers``.
    return (*EVICTION, "belady", "s3-fifo", "none")


def held(experts: np.ndarray, num_experts: int, slots: int, policy: str = "lru") -> np.ndarray:
    """Whether each of the experts ``[T, L, K]`` is in a slot when it is needed: ``[T, L, K]``."""
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
    replay_layer = _s3_fifo if policy == "s3-fifo" else _by_table
    layers = experts.transpose(1, 0, 2).tolist()
    hits = [replay_layer(rows, min(slots, num_experts), policy) for rows in layers]
    return np.array(hits, bool).reshape(len(layers), -1, K).transpose(1, 0, 2)


def _by_table(rows, slots, policy):
    """Replay one layer's tokens ``[T, K]`` with a slot table; return which experts were held."""
    table = _Belady(slots, rows) if policy == "belady" else SlotTable(slots, policy)
    hit = []
    for need in rows:
        hits, misses = table.choose(need)
        table.commit(misses)
        hit.append([e in hits for e in need])
    return hit


def _s3_fifo(rows, slots, _):
    """Replay one layer's tokens by S3-FIFO (Yang et al., SOSP 2023)."""
    room = max(1, slots // 10)  # slots for the queue of new experts
    small, main, ghosts, uses = deque(), deque(), {}, {}  # ``uses``: counts, by held expert

    def evict(queue, need):
        passed = 0  # how many needed experts were passed over since the last change
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

    hit = []
    for need in rows:
        hit.append([e in uses for e in need])
        missing = [e for e in need if e not in uses]
        uses |= {e: min(3, uses[e] + 1) for e in need if e in uses}
        for e in missing:
            if len(uses) == slots:
                first, second = (small, main) if len(small) >= room else (main, small)
                evict(first, need) or evict(second, need)
            (main if ghosts.pop(e, False) else small).append(e)
            uses[e] = 0
    return hit

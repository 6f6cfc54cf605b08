"""Replay a routing with experts divided over ranks: a layer waits for the rank that reads most."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def reads(
    experts: np.ndarray,
    owners: np.ndarray | None,
    slots: int,
    ranks: int,
    shared: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """Count the experts that each of N ranks reads for each token with LRU slots: ``[T, L, N]``.

    ``owners`` ``[L, E]`` has the rank of each expert; None: the rank with the fewest reads in the
    layer reads an expert that no rank holds. Every rank always holds each layer's ``shared``
    experts, in some of its ``slots``.
    """
    T, L, _ = experts.shape
    found = np.zeros((T, L, ranks), np.int64)
    for layer in range(L):
        hot = set(shared[layer]) if shared else ()
        held = [deque(maxlen=slots - len(hot)) for _ in range(ranks)]  # least recently used first
        for t, needed in enumerate(experts[:, layer].tolist()):
            needed = [e for e in needed if e not in hot]
            if owners is None:
                mine = _divided(needed, held)
            else:
                mine = [[e for e in needed if owners[layer, e] == r] for r in range(ranks)]
            for rank, own in enumerate(held):
                for e in sorted(mine[rank], key=own.count, reverse=True):  # held ones first
                    if e in own:
                        own.remove(e)
                    else:
                        found[t, layer, rank] += 1
                    own.append(e)
    return found


def _divided(needed, held):
    """Give each rank the needed experts that it holds, and a share of those that no rank holds."""
    mine, misses = [[e for e in needed if e in own] for own in held], [0] * len(held)
    for e in needed:
        if not any(e in own for own in held):
            rank = min(range(len(held)), key=lambda r: (misses[r], len(mine[r])))
            mine[rank].append(e)
            misses[rank] += 1
    return mine


def waited(found: np.ndarray) -> tuple[float, float]:
    """Return how many reads a token waits for, and how many if they were divided equally."""
    return float(found.max(2).sum(1).mean()), float(found.mean(2).sum(1).mean())


@dataclass(frozen=True)
class Machines:
    """Equal machines with one rank each, and the costs of a token on these machines."""

    ranks: int  # N
    disk_bytes_per_s: float  # of each machine's SSD
    link_bytes_per_s: float  # from one machine to the next
    latency_s: float  # of a message
    compute_s: float  # a token's arithmetic, with every expert held and nothing exchanged

    def parts(
        self, waited_reads: float, expert_nbytes: int, layers: int, rows: float, row_nbytes: int
    ) -> dict[str, float]:
        """Seconds of a token, whose layers read, compute and exchange without overlap."""
        # An ``all_gather`` on a ring: each block of ``rows`` passes N - 1 links.
        link_s = self.latency_s + rows * row_nbytes / self.link_bytes_per_s
        return {
            "reads": waited_reads * expert_nbytes / self.disk_bytes_per_s,
            "arithmetic": self.compute_s,
            "exchange": layers * ((self.ranks - 1) * link_s),
        }

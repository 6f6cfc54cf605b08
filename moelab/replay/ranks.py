"""Experts divided over ranks, replayed from a routing: what each reads, and what a token takes.

The ranks compute one layer after another together, so a layer waits for the rank that reads most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..streaming.residency.table import SlotTable


def reads(
    experts: np.ndarray,
    owners: np.ndarray | None,
    slots: int,
    ranks: int,
    shared: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """How many experts each rank reads for each token, with the engine's tables (LRU).

    Args:
        experts (np.ndarray): ``[T, L, K]``.
        owners (np.ndarray or None): ``[L, E]``, the rank of each expert. None: any rank may read
            any expert; what none holds is read by the one that reads least in this layer.
        slots (int): S, of each rank and layer, those of shared experts included.
        ranks (int): N.
        shared (Sequence[Sequence[int]]): Of each layer, experts that all ranks hold all the time.

    Returns:
        np.ndarray: ``[T, L, N]``.
    """
    T, L, _ = experts.shape
    found = np.zeros((T, L, ranks), np.int64)
    for layer in range(L):
        hot = set(shared[layer]) if shared else ()
        tables = [SlotTable(slots - len(hot)) for _ in range(ranks)]
        for t, needed in enumerate(experts[:, layer].tolist()):
            needed = [e for e in needed if e not in hot]
            if owners is None:
                mine = _divided(needed, tables)
            else:
                mine = [[e for e in needed if owners[layer, e] == r] for r in range(ranks)]
            for rank, table in enumerate(tables):
                for wave in table.waves(mine[rank]):
                    misses = table.choose(wave)[1]
                    table.commit(misses)
                    found[t, layer, rank] += len(misses)
    return found


def _divided(needed, tables):
    """By rank: the experts that it holds, and of those that none holds its fair share."""
    mine = [[e for e in needed if e in table.slot_of] for table in tables]
    held, misses = {e for own in mine for e in own}, [0] * len(tables)
    for e in needed:
        if e not in held:
            rank = min(range(len(tables)), key=lambda r: (misses[r], len(mine[r])))
            mine[rank].append(e)
            misses[rank] += 1
    return mine


def waited(found: np.ndarray) -> tuple[float, float]:
    """Reads of a token that the ranks wait for, and those of a perfect balance.

    Args:
        found (np.ndarray): ``[T, L, N]``, of ``reads``.

    Returns:
        tuple[float, float]: Of the rank that reads most in each layer, and of the mean, summed
        over the layers.
    """
    return float(found.max(2).sum(1).mean()), float(found.mean(2).sum(1).mean())


@dataclass(frozen=True)
class Machines:
    """Machines of one kind, one rank on each, and what a token takes on them.

    Attributes:
        ranks (int): N.
        disk_bytes_per_s (float): Of each one's SSD.
        link_bytes_per_s (float): From one to the next.
        latency_s (float): Of a message.
        compute_s (float): A token's arithmetic, with every expert held and nothing exchanged.
    """

    ranks: int
    disk_bytes_per_s: float
    link_bytes_per_s: float
    latency_s: float
    compute_s: float

    def exchange_s(self, rows: float, row_nbytes: int) -> float:
        """One ``all_gather`` on a ring: each block passes N - 1 links.

        Args:
            rows (float): Of each rank's block.
            row_nbytes (int): Bytes of a row.
        """
        one = self.latency_s + rows * row_nbytes / self.link_bytes_per_s
        return (self.ranks - 1) * one

    def parts(
        self, waited_reads: float, expert_nbytes: int, layers: int, rows: float, row_nbytes: int
    ) -> dict[str, float]:
        """Seconds of a token. Nothing overlaps: a layer reads, computes, exchanges.

        Args:
            waited_reads (float): Of ``waited``, in all layers.
            expert_nbytes (int): Bytes of an expert.
            layers (int): L.
            rows (float): Of a rank's block in a layer.
            row_nbytes (int): Bytes of a row.
        """
        return {
            "reads": waited_reads * expert_nbytes / self.disk_bytes_per_s,
            "arithmetic": self.compute_s,
            "exchange": layers * self.exchange_s(rows, row_nbytes),
        }

"""What tokens, reads and arithmetic cost on one machine."""

from dataclasses import dataclass, fields, replace

import numpy as np

from ..streaming.residency.residency import OVERLAP_S


@dataclass(frozen=True)
class Costs:
    """What things take on one machine.

    Attributes:
        fixed_s (float): A token's work except the routed experts: attention, router, head, Python.
        expert_s (float): One expert's arithmetic for one token.
        warm_s_per_byte (float): A byte read from the page cache, with the engine's reads in flight.
        cold_s_per_byte (float): A byte read from the disk, with as many.
        warm_call_s (float): The fixed part of a layer's reads if all come from the page cache.
        cold_call_s (float): The fixed part if at least one comes from the disk.
        overlap (float): Where the engine overlaps a layer's reads and arithmetic, the share of the
            shorter of the two that is hidden, 0 to 1.
    """

    fixed_s: float
    expert_s: float
    warm_s_per_byte: float
    cold_s_per_byte: float
    warm_call_s: float = 0.0
    cold_call_s: float = 0.0
    overlap: float = 0.0

    @classmethod
    def median(cls, costs: list["Costs"]) -> "Costs":
        """The median of several measurements, field by field."""
        return cls(*(float(np.median([getattr(c, f.name) for c in costs])) for f in fields(cls)))

    def without_arithmetic(self) -> "Costs":
        """The same reads on a device that computes in no time."""
        return replace(self, fixed_s=0.0, expert_s=0.0, overlap=0.0)

    def all_cached(self) -> "Costs":
        """As if the page cache held the whole file: a read from the disk costs what a copy does."""
        return replace(self, cold_s_per_byte=self.warm_s_per_byte, cold_call_s=self.warm_call_s)

    def faster_copies(self, factor: float) -> "Costs":
        """With a page cache that is so many times as fast."""
        return replace(
            self,
            warm_s_per_byte=self.warm_s_per_byte / factor,
            warm_call_s=self.warm_call_s / factor,
        )

    def faster_disk(self, factor: float) -> "Costs":
        """With a disk of so many times the bandwidth."""
        return replace(self, cold_s_per_byte=self.cold_s_per_byte / factor)

    def copies_s(self, warm: np.ndarray, cold: np.ndarray, nbytes: int) -> np.ndarray:
        """Seconds that layers spend on the page cache.

        Args:
            warm (np.ndarray): Experts of ``nbytes`` that come from the page cache, by layer.
            cold (np.ndarray): Experts that come from the disk in the same calls.
            nbytes (int): One expert.
        """
        call_s = self.warm_call_s * ((warm > 0) & (cold == 0))
        return warm * (nbytes * self.warm_s_per_byte) + call_s

    def disk_s(self, cold: np.ndarray, extra: np.ndarray, nbytes: int) -> np.ndarray:
        """Seconds that layers spend on the disk; ``extra`` experts come by read-ahead."""
        return (cold + extra) * (nbytes * self.cold_s_per_byte) + self.cold_call_s * (cold > 0)

    def hidden_s(self, reads_s: np.ndarray, experts_s: float) -> np.ndarray:
        """Seconds of each layer's reads that overlap hides; short reads are not overlapped."""
        return np.where(reads_s >= OVERLAP_S, self.overlap * np.minimum(reads_s, experts_s), 0.0)


@dataclass(frozen=True)
class CostSamples:
    """The samples that ``Costs`` are computed from, in seconds.

    Attributes:
        L (int): MoE layers.
        K (int): Experts per token.
        expert_nbytes (int): One expert on disk.
        warm (dict[int, list[float]]): A layer's reads with so many misses, from the page cache.
        cold (dict[int, list[float]]): The same from the disk.
        hit (list[float]): A token whose experts are all in slots.
        miss (list[float]): A token with the most misses in every layer, all from the disk.
        expert_s (float): One expert's arithmetic, a median.
    """

    L: int
    K: int
    expert_nbytes: int
    warm: dict[int, list[float]]
    cold: dict[int, list[float]]
    hit: list[float]
    miss: list[float]
    expert_s: float

    def costs(self) -> Costs:
        """Medians, and a straight line through the reads from each source."""
        (warm_s_per_byte, warm_call_s), (cold_s_per_byte, cold_call_s) = (
            _line(np.array(list(s)) * self.expert_nbytes, [np.median(v) for v in s.values()])
            for s in (self.warm, self.cold)
        )
        hit_s, miss_s = np.median(self.hit), np.median(self.miss)
        reads_s, experts_s = np.median(self.cold[max(self.cold)]), self.K * self.expert_s
        hidden = 1 - (miss_s - hit_s) / (self.L * reads_s)  # share of the reads
        overlap = hidden * reads_s / min(reads_s, experts_s) if experts_s else 0.0
        return Costs(
            fixed_s=float(max(0.0, hit_s - self.L * experts_s)),
            expert_s=self.expert_s,
            warm_s_per_byte=warm_s_per_byte,
            cold_s_per_byte=cold_s_per_byte,
            warm_call_s=warm_call_s,
            cold_call_s=cold_call_s,
            overlap=float(np.clip(overlap, 0, 1)),
        )


def _line(nbytes, seconds):
    """Seconds per byte and per call, by least squares of relative errors; neither is negative."""
    x, y = np.asarray(nbytes, float), np.asarray(seconds)
    if len(x) > 1:
        slope, call_s = np.polyfit(x, y, 1, w=1 / y)
        if slope >= 0 and call_s >= 0:
            return float(slope), float(call_s)
    return float((x * y).sum() / (x * x).sum()), 0.0

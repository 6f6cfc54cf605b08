"""What tokens, reads and arithmetic cost on one machine."""

from dataclasses import dataclass, replace
from math import isnan, nan

import numpy as np

from ..streaming.residency.residency import OVERLAP_S


@dataclass(frozen=True)
class Costs:
    """What things take on one machine.

    Attributes:
        fixed_s (float): A token's work except the routed experts: attention, router, head, Python.
        expert_s (float): One expert's arithmetic for one token.
        warm_s_per_byte (float): A byte read from the page cache, with the engine's reads in flight.
        cold_s_per_byte (float): A byte read from the disk, with as many, while the engine computes
            with other experts: both share cores and memory.
        warm_call_s (float): The fixed part of a layer's reads if all come from the page cache.
        cold_call_s (float): The fixed part if at least one comes from the disk.
        overlap (float): Where the engine overlaps a layer's reads and arithmetic, the share of the
            shorter of the two that is hidden, 0 to 1. It is small where reads take time of the
            cores that compute.
        direct_s_per_byte (float): A byte read past the page cache; nan where that is impossible.
        direct_call_s (float): The fixed part of a layer's reads past the page cache.
        direct_overlap (float): As ``overlap``, of reads past the page cache.
        held_fixed_s (float): As ``fixed_s``, where every expert is in a slot, so that no routing is
            waited for; nan where that was not measured.
        host_s_per_byte (float): A byte that a GPU copies from the host's memory by itself, without
            waiting for the routing; nan where there is no such GPU.
        prompt_token_s (float): One token's work in a prompt of ``lab.experiments.costs.PROMPT``
            tokens that are computed at once, no read counted; nan where that was not measured.
    """

    fixed_s: float
    expert_s: float
    warm_s_per_byte: float
    cold_s_per_byte: float
    warm_call_s: float = 0.0
    cold_call_s: float = 0.0
    overlap: float = 0.0
    direct_s_per_byte: float = nan
    direct_call_s: float = 0.0
    direct_overlap: float = 0.0
    held_fixed_s: float = nan
    host_s_per_byte: float = nan
    prompt_token_s: float = nan

    @property
    def reads_direct(self) -> bool:
        """Whether reads past the page cache are known."""
        return not isnan(self.direct_s_per_byte)

    def past_the_page_cache(self) -> "Costs":
        """Every read goes past the page cache.

        Raises:
            ValueError: If that is impossible, or was not measured.
        """
        if not self.reads_direct:
            raise ValueError(
                "direct: expected costs of reads past the page cache, got none. Measure them on "
                "Linux, or leave direct out."
            )
        return replace(
            self,
            cold_s_per_byte=self.direct_s_per_byte,
            cold_call_s=self.direct_call_s,
            overlap=self.direct_overlap,
        )

    def all_warm(self) -> "Costs":
        """Every read comes from the page cache."""
        warm = self.warm_s_per_byte, self.warm_call_s
        return replace(self, cold_s_per_byte=warm[0], cold_call_s=warm[1])

    def without_reads(self) -> "Costs":
        """Every expert is in a slot: nothing is read, and nothing waited for."""
        return self._not_waiting(0.0)

    def from_host(self) -> "Costs":
        """A GPU copies every expert that it misses from the host's memory.

        Raises:
            ValueError: If no GPU does so, or that was not measured.
        """
        if isnan(self.host_s_per_byte):
            raise ValueError(
                "source=host: expected costs of copies from the host's memory, got none. Measure "
                "them on a CUDA GPU with memory for every expert."
            )
        return self._not_waiting(self.host_s_per_byte)

    def _not_waiting(self, byte_s):
        fixed_s = self.fixed_s if isnan(self.held_fixed_s) else self.held_fixed_s
        return replace(
            self,
            **{"fixed_s": fixed_s, "warm_s_per_byte": byte_s, "cold_s_per_byte": byte_s},
            **{"direct_s_per_byte": nan, "warm_call_s": 0.0, "cold_call_s": 0.0, "overlap": 0.0},
        )

    def without_arithmetic(self) -> "Costs":
        """The same reads on a device that computes in no time."""
        return replace(self, fixed_s=0.0, expert_s=0.0, overlap=0.0, direct_overlap=0.0)

    def faster_copies(self, factor: float) -> "Costs":
        """With a page cache that is so many times as fast."""
        return replace(
            self,
            warm_s_per_byte=self.warm_s_per_byte / factor,
            warm_call_s=self.warm_call_s / factor,
        )

    def faster_disk(self, factor: float) -> "Costs":
        """With a disk of so many times the bandwidth."""
        return replace(
            self,
            cold_s_per_byte=self.cold_s_per_byte / factor,
            direct_s_per_byte=self.direct_s_per_byte / factor,
        )

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

"""What tokens, reads and arithmetic cost on one machine."""

from dataclasses import dataclass, replace
from math import isnan, nan


@dataclass(frozen=True)
class Costs:
    """Seconds on one machine: of a token's fixed work, of experts' arithmetic and of reads."""

    fixed_s: float  # a token's work except the routed experts: attention, router, head, Python
    expert_s: float  # one expert's arithmetic for one token
    warm_s_per_byte: float  # a byte read from the page cache, by the engine's concurrent reads
    cold_s_per_byte: float  # a byte read from the disk, while the engine computes
    warm_call_s: float = 0.0  # the fixed part of a layer's reads if all come from the page cache
    cold_call_s: float = 0.0  # the fixed part if at least one comes from the disk
    # This share (0 to 1) of the shorter time is hidden where the engine overlaps a layer's reads
    # and arithmetic. The share is small where reads take time from the cores that compute.
    overlap: float = 0.0
    direct_s_per_byte: float = nan  # a byte read past the page cache; nan where that is impossible
    direct_call_s: float = 0.0  # the fixed part of a layer's reads past the page cache
    direct_overlap: float = 0.0  # ``overlap`` for reads past the page cache
    held_fixed_s: float = nan  # ``fixed_s`` with every expert in a slot; nan: not measured
    prompt_token_s: float = nan  # a token of a prompt in one pass, without reads; nan: unknown

    @property
    def reads_direct(self) -> bool:
        """Whether the costs of reads past the page cache are known."""
        return not isnan(self.direct_s_per_byte)

    def past_the_page_cache(self) -> "Costs":
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

    def without_reads(self) -> "Costs":
        """The costs if no expert has to be read."""
        fixed_s = self.fixed_s if isnan(self.held_fixed_s) else self.held_fixed_s
        zeros = ("warm_s_per_byte", "cold_s_per_byte", "warm_call_s", "cold_call_s", "overlap")
        return replace(self, fixed_s=fixed_s, direct_s_per_byte=nan, **dict.fromkeys(zeros, 0.0))

    def without_arithmetic(self) -> "Costs":
        """The costs of the same reads on a device that computes in no time."""
        return replace(self, fixed_s=0.0, expert_s=0.0, overlap=0.0, direct_overlap=0.0)

    def faster_copies(self, factor: float) -> "Costs":
        """The costs with a page cache that is ``factor`` times as fast."""
        return replace(
            self,
            warm_s_per_byte=self.warm_s_per_byte / factor,
            warm_call_s=self.warm_call_s / factor,
        )

"""Estimate a token's time on a machine from a few numbers, for plans without measurements.

A token takes the time in which the memory, or a CPU's cores, can go through its weights. Each layer
adds a fixed time, and more time if some of its experts have to be read.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import inf, isnan, nan

import numpy as np

from ..memory import CLIFF, Most, gpu_limit, most_for_a_model
from ..streaming.facts import ModelFacts
from ..streaming.plan import Plan
from ..streaming.trace import Trace
from .costs import Costs
from .locality import Locality, synthesize
from .pagecache import Replay

# On a Mac: seconds of a layer, seconds more if it reads, bytes a second copied from the page cache.
# ``data/recipes/published.py`` at 6fe0031 fitted these numbers to a typical published engine.
LAYER_S, WAIT_S, COPY_BYTES_PER_S = 0.328e-3, 0.962e-3, 22.1e9
# A plan takes this share of an SSD's stated rate. Here the engine reads at 0.95 [0.91, 0.97]
# of fio's rate (data/results/cpu_reads_35b.json: two cores of an EPYC, n=15; 0.85 with engine 1).
DISK_SHARE = 0.8
# Measured on a CPU (data/results/cpu_costs_35b.json): a core multiplies weights, and experts are
# copied from the page cache, at these rates. The next three: seconds of a layer, and extra
# seconds if it reads from the disk, or from the page cache.
CORE_BYTES_PER_S, CPU_COPY_BYTES_PER_S = 9.6e9, 6.1e9
CPU_LAYER_S, CPU_WAITS_S = 1.5e-3, (0.76e-3, 0.43e-3)
# On a CPU, a token of a prompt read in one pass takes this share of a decoded token's arithmetic
# (measured on 26 November with two cores of a Xeon).
CPU_PROMPT_SHARE = 0.5
MAX_BYTES_PER_S = 1e13  # of weights; a higher rate would be a timing error of a small expert
# A layer's k-th most popular expert is chosen in proportion to ``k ** -ZIPF``, independently of
# earlier tokens. `data/recipes/published.py` at 6fe0031 fitted ``ZIPF`` to published hit rates.
ZIPF = 1.12
# The system and other programs take ``SYSTEM_NBYTES``, at most a quarter of the memory.
SYSTEM_NBYTES, SYSTEM_SHARE = 4e9, 0.25
# GB/s of a Mac's memory, as Apple states them (M5 Ultra and M6: as others quote them); the larger
# rate where a chip has two.
CHIPS = {
    "A18 Pro": 60,
    "M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800,
    "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800,
    "M3": 100, "M3 Pro": 150, "M3 Max": 400, "M3 Ultra": 819,
    "M4": 120, "M4 Pro": 273, "M4 Max": 546,
    "M5": 153, "M5 Pro": 307, "M5 Max": 614, "M5 Ultra": 1200,
    "M6": 170,
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The memory of a machine, and the rates and times of a token on that machine."""

    ram_nbytes: float
    taken_nbytes: float  # memory that the system and other programs take
    disk_bytes_per_s: float  # the engine reads experts from the SSD at this rate
    weights_bytes_per_s: float  # rate at which a token's arithmetic goes through weights
    layer_s: float  # seconds of a layer, those for its weights left out
    wait_s: tuple[float, float]  # seconds more if a layer reads: from the SSD, from the page cache
    copy_bytes_per_s: float  # experts are read from the page cache at this rate
    # Time for weights of a prompt's token, as a share of a decoded token's; nan: unknown (0 to 1).
    prompt_share: float = nan
    held_layer_s: float = nan  # ``layer_s`` with every expert in a slot; nan: as ``layer_s``
    is_mac: bool = False  # whether a Mac's GPU computes, in the same memory
    memory_binds: bool = False  # whether the memory limits the CPU: more cores do not help

    @classmethod
    def mac(cls, ram_nbytes: float, disk_bytes_per_s: float, memory_bytes_per_s: float):
        """A Mac with the rates of its SSD and its memory."""
        disk, taken = DISK_SHARE * disk_bytes_per_s, taken_of(ram_nbytes)
        rates = memory_bytes_per_s, LAYER_S, (WAIT_S, WAIT_S), COPY_BYTES_PER_S
        return cls(ram_nbytes, taken, disk, *rates, is_mac=True)

    @classmethod
    def cpu(cls, ram_nbytes: float, disk_bytes_per_s: float, cores: int, memory_rate: float = inf):
        """A computer whose CPU computes, with the rates of its SSD and memory (bytes a second)."""
        disk, taken = DISK_SHARE * disk_bytes_per_s, taken_of(ram_nbytes)
        most = cores * CORE_BYTES_PER_S
        rates = min(most, memory_rate), CPU_LAYER_S, CPU_WAITS_S, CPU_COPY_BYTES_PER_S
        binds = memory_rate < most
        return cls(ram_nbytes, taken, disk, *rates, CPU_PROMPT_SHARE, memory_binds=binds)

    @classmethod
    def measured(
        cls,
        costs: Costs,
        facts: ModelFacts,
        ram_nbytes: float,
        taken_nbytes: float,
        is_mac: bool = False,
    ):
        """Make a machine from costs that were measured on it with the model of ``facts``."""
        most = 1e9 * max(CHIPS.values()) if is_mac else MAX_BYTES_PER_S
        rate = min(most, facts.expert_nbytes / max(costs.expert_s, 1e-12))

        def layer_s(fixed_s):
            return float(np.maximum(0.0, fixed_s - facts.dense_nbytes / rate)) / facts.num_blocks

        return cls(
            ram_nbytes,
            taken_nbytes,
            1 / (costs.direct_s_per_byte if costs.reads_direct else costs.cold_s_per_byte),
            rate,
            layer_s(costs.fixed_s),
            (costs.cold_call_s, costs.warm_call_s),
            1 / costs.warm_s_per_byte,
            costs.prompt_token_s * rate / facts.active_nbytes,
            layer_s(costs.held_fixed_s),
            is_mac=is_mac,
        )

    @property
    def memory_nbytes(self) -> float:
        """Bytes that a model and its page cache may take."""
        return self.ram_nbytes - self.taken_nbytes

    @property
    def most(self) -> Most:
        """The bytes of memory that a plan may fill."""
        limit = gpu_limit(self.ram_nbytes) if self.is_mac else self.memory_nbytes
        found = most_for_a_model(self.ram_nbytes, self.is_mac)
        return Most(*(min(self.memory_nbytes, limit, nbytes) for nbytes in found))

    def swaps(self, held_nbytes: float) -> bool:
        """Whether a Mac probably swaps if a model's arrays take ``held_nbytes``."""
        return self.is_mac and held_nbytes > self.most.least

    def prompt_s(self, plan: Plan, tokens: int, slots: int) -> tuple[float, float]:
        """The least and most seconds until the token after a prompt; at first memory has no expert.

        A prompt is computed in parts of ``plan.prompt_tokens`` tokens. Each part reads the experts
        that are in no slot. Reads overlap the arithmetic (least) or come before it (most).
        """
        step, facts = plan.prompt_tokens, plan.facts
        needed = [distinct(facts, min(step, tokens - i)) for i in range(0, tokens, step)]
        experts = needed[0] + sum(max(0.0, n - slots) for n in needed[1:])
        reads_s = facts.num_layers * experts * facts.expert_nbytes / self.disk_bytes_per_s
        shares = (0.0, 1.0) if isnan(self.prompt_share) else (self.prompt_share, self.prompt_share)
        all_s = tokens * facts.active_nbytes / self.weights_bytes_per_s
        return max(reads_s, shares[0] * all_s), reads_s + shares[1] * all_s

    def reads_s(self, found: Replay) -> tuple[float, float, float]:
        """Divide a replayed token's read time into SSD, page cache, and waiting for either."""
        reads_s = sum(found.parts_s[part] for part in ("copies", "disk", "hidden"))
        ssd_s = min(reads_s, found.read_per_token / self.disk_bytes_per_s)
        copies_s = min(reads_s - ssd_s, found.copied_per_token / self.copy_bytes_per_s)
        return ssd_s, copies_s, reads_s - ssd_s - copies_s

    def costs(self, facts: ModelFacts, held_nbytes: float = 0.0) -> Costs:
        """The costs that a replay needs, for a model whose arrays take ``held_nbytes``."""
        # A Mac that swaps drops the memory used longest ago. This is the memory needed next.
        slow = CLIFF if self.swaps(held_nbytes) else 1
        past = (1 / self.disk_bytes_per_s, self.wait_s[0]) if not self.is_mac else (float("nan"), 0)
        backbone_s = facts.dense_nbytes / self.weights_bytes_per_s
        return Costs(
            fixed_s=slow * (backbone_s + facts.num_blocks * self.layer_s),
            held_fixed_s=slow * (backbone_s + facts.num_blocks * self.held_layer_s),
            expert_s=slow * facts.expert_nbytes / self.weights_bytes_per_s,
            warm_s_per_byte=slow / self.copy_bytes_per_s,
            cold_s_per_byte=slow / self.disk_bytes_per_s,
            warm_call_s=slow * self.wait_s[1],
            cold_call_s=slow * self.wait_s[0],
            direct_s_per_byte=past[0],
            direct_call_s=past[1],
        )


def typical_trace(facts: ModelFacts, tokens: int) -> Trace:
    """Make a trace with a model's shape and the slot hit rates of published models."""
    return _trace(*facts.shape, tokens)


@lru_cache(maxsize=32)  # the same trace for every machine, so that cached replays are used
def _trace(L, K, E, tokens):
    return synthesize(Locality((ZIPF,), (0.0,), (1.0,)), tokens, L, E, K)


def distinct(facts: ModelFacts, tokens: int) -> float:
    """Estimate how many distinct experts ``tokens`` tokens of ``typical_trace`` need in a layer."""
    popular = np.arange(1, facts.num_experts + 1) ** -ZIPF
    low, high = 0.0, 1e9  # bounds of the factor for which one token needs K experts
    for _ in range(100):
        middle = (low + high) / 2
        few = -np.expm1(-middle * popular).sum() < facts.top_k
        low, high = (middle, high) if few else (low, middle)
    return float(-np.expm1(-low * popular * tokens).sum())


def taken_of(ram_nbytes: float) -> float:
    """Return the bytes that the system and other programs usually take of a machine's memory."""
    return min(SYSTEM_NBYTES, SYSTEM_SHARE * ram_nbytes)

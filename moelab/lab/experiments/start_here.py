"""Notebook 00: one run of a model, its text, its tokens and the memory that it took."""

from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ... import StreamConfig, footprint, load
from ...shipped import shipped
from .. import machine, records
from ..decode import decode, same_tokens

MODES = ("resident", "serial", "buffers", "stacked", "fused")
SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Plan:
    """The memory that a model should take, with several numbers of slots.

    Attributes:
        resident_nbytes (int): With every expert in memory.
        allowed_nbytes (int): What it may take.
        nbytes (dict[int, int]): With S slots in each layer, by S.
        num_layers, num_experts, top_k, expert_nbytes (int): L, E, K, and one expert on disk.
    """

    resident_nbytes: int
    allowed_nbytes: int
    nbytes: dict[int, int]
    num_layers: int
    num_experts: int
    top_k: int
    expert_nbytes: int

    @property
    def slots(self) -> int:
        """The most slots that fit into what is allowed; the fewest there are if none do."""
        fitting = [s for s, nbytes in self.nbytes.items() if nbytes <= self.allowed_nbytes]
        return max(fitting, default=min(self.nbytes))

    @property
    def hit_rate(self) -> float:
        """Share of hits with ``slots`` if every expert were equally likely."""
        return self.slots / self.num_experts

    @property
    def bytes_per_token(self) -> float:
        """Bytes read for a token at that ``hit_rate``."""
        return self.num_layers * self.top_k * (1 - self.hit_rate) * self.expert_nbytes

    def _repr_markdown_(self):
        rows = [("every expert", self.resident_nbytes)]
        rows += [(f"{s} slots", nbytes) for s, nbytes in self.nbytes.items()]
        lines = [
            f"{self.num_layers} layers of {self.num_experts} experts of "
            f"{self.expert_nbytes / 1e3:.0f} kB, {self.top_k} for each token; "
            f"{self.allowed_nbytes / 1e6:.1f} MB allowed.",
            "",
            "| in memory | predicted (MB) | |",
            "|---|---|---|",
        ]
        for name, nbytes in rows:
            fits = "the most that fits" if nbytes == self.nbytes[self.slots] else ""
            lines.append(f"| {name} | {nbytes / 1e6:.1f} | {fits} |")
        told = f"{self.hit_rate:.0%} hits and {self.bytes_per_token / 1e6:.2f} MB read for a token"
        return "\n".join([*lines, "", f"With {self.slots} slots, experts equally likely: {told}."])


def plan(path: str | Path, allowed: float) -> Plan:
    """Predicts a model's memory from its file's header; no weights are read.

    Args:
        path (str or Path): A model folder.
        allowed (float): Share of the resident model's memory that may be used.
    """
    resident = footprint(path, StreamConfig(mode="resident"))
    sizes = [s for s in SLOTS if resident.top_k <= s <= resident.num_experts]
    return Plan(
        resident_nbytes=resident.total_nbytes,
        allowed_nbytes=int(allowed * resident.total_nbytes),
        nbytes={s: footprint(path, StreamConfig(slots=s)).total_nbytes for s in sizes},
        num_layers=resident.num_layers,
        num_experts=resident.num_experts,
        top_k=resident.top_k,
        expert_nbytes=resident.expert_nbytes,
    )


@dataclass(frozen=True)
class Run:
    """A greedy run of one model.

    Attributes:
        config (StreamConfig): How it streamed.
        tokens (list[int]): What it wrote; an end of text does not stop it.
        text (str): The same, decoded.
        step_s (np.ndarray): Seconds of each token after the first, ``[T - 1]``.
        wait_s (float): Seconds of an average token spent waiting for reads.
        hit_rate (float): Share of the needed experts that were in memory, decoding only; nan when
            resident.
        bytes_per_token (float): Bytes read for a token, decoding only.
        held_nbytes (int): MLX's memory for the model once loaded.
        peak_nbytes (int): The most that MLX held during the run, caches and activations included.
    """

    config: StreamConfig
    tokens: list[int]
    text: str
    step_s: np.ndarray
    wait_s: float
    hit_rate: float
    bytes_per_token: float
    held_nbytes: int
    peak_nbytes: int

    def same_tokens(self, other: "Run") -> int:
        """How many tokens from the first on are those of ``other``."""
        return same_tokens(self.tokens, other.tokens)


def run(path: str | Path, config: StreamConfig, prompt: str, tokens: int) -> Run:
    """Loads the model, decodes greedily and closes it again.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig): How to stream.
        prompt (str): The text to continue, taken as it is.
        tokens (int): How many tokens to write.
    """
    mx.clear_cache()
    before = mx.get_active_memory()
    model, tokenizer = load(path, config)
    with model:
        held = mx.get_active_memory() - before
        mx.reset_peak_memory()
        ran = decode(model, tokenizer.encode(prompt), tokens - 1)
    counted = ran.counters
    return Run(
        config=config.resolved(),
        tokens=ran.tokens,
        text=tokenizer.decode(ran.tokens),
        step_s=np.array(ran.step_s),
        wait_s=counted.wait_s / max(counted.tokens, 1),
        hit_rate=counted.hit_rate,
        bytes_per_token=counted.bytes_per_token,
        held_nbytes=held,
        peak_nbytes=mx.get_peak_memory() - before,
    )


@dataclass(frozen=True)
class Runs:
    """The same prompt in every mode, and with every number of slots.

    Attributes:
        plan (Plan): What was predicted.
        model (str): The model's name.
        modes (dict[str, Run]): By mode, with the plan's ``slots``.
        slots (dict[int, Run]): ``fused``, by the number of slots.
    """

    plan: Plan
    model: str
    modes: dict[str, Run]
    slots: dict[int, Run]

    @property
    def error(self) -> float:
        """The largest relative error of the predicted memory."""
        return max(abs(run.held_nbytes / self.plan.nbytes[s] - 1) for s, run in self.slots.items())

    def record(self) -> dict:
        """What notebook 00 states, for ``data/results``; no times."""
        fields = ("held_nbytes", "peak_nbytes", "hit_rate", "bytes_per_token")
        resident = self.modes["resident"]

        def row(run):
            row = {k: getattr(run, k) for k in fields} | {"same_tokens": run.same_tokens(resident)}
            if run.config.mode == "resident":
                row["hit_rate"] = None  # JSON has no nan
            return row

        return {
            "kind": "start_here",
            "model": self.model,
            "machine": machine.card(),
            "tokens": len(resident.tokens),
            "plan": asdict(self.plan),
            "modes": {name: row(run) for name, run in self.modes.items()},
            "slots": {s: row(run) for s, run in self.slots.items()},
        }


def measure(path: str | Path, planned: Plan, prompt: str, tokens: int) -> Runs:
    """``run`` in every mode, and ``fused`` with every number of slots of a plan.

    Args:
        path (str or Path): A model folder.
        planned (Plan): From ``plan``.
        prompt (str): The text to continue.
        tokens (int): How many tokens to write.
    """

    def ran(**fields):
        return run(path, StreamConfig(**fields), prompt, tokens)

    return Runs(
        plan=planned,
        model=Path(path).name,
        modes={mode: ran(mode=mode, slots=planned.slots) for mode in MODES},
        slots={s: ran(slots=s) for s in planned.nbytes},
    )


PROMPT, TOKENS, ALLOWED = "import os\n\n\ndef read_lines(path):\n", 96, 0.5


def main(out: str) -> None:
    """Writes the record of notebook 00: ``data/results/cpu_start_here.json``."""
    path = shipped("models", "tiny-moe")
    records.save(out, measure(path, plan(path, ALLOWED), PROMPT, TOKENS).record())

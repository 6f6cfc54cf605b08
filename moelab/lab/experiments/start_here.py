"""Notebook 00: one run of a model, its text, its tokens and the memory that it took."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ... import DATA, StreamConfig, footprint, load
from .. import machine, records
from ..decode import decode, same_tokens
from ..plots import charts, style
from ..timing import quartiles_text

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
    nbytes: dict
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


def plan(path, allowed: float) -> Plan:
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
    tokens: list
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


def run(path, config: StreamConfig, prompt: str, tokens: int) -> Run:
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
        config=config,
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
    modes: dict
    slots: dict

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


def measure(path, planned: Plan, prompt: str, tokens: int) -> Runs:
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


def mode_bars(runs: Runs):
    """Memory of every mode, and whether it wrote the resident model's tokens."""
    resident = runs.modes["resident"]
    same = {name: run.same_tokens(resident) for name, run in runs.modes.items()}
    equal = sum(n == len(resident.tokens) for n in same.values())
    told = ", ".join(f"{name} {n}" for name, n in same.items() if name != "resident")
    return charts.bars(
        {
            "held once loaded": {n: [r.held_nbytes] for n, r in runs.modes.items()},
            "peak of the run": {n: [r.peak_nbytes] for n, r in runs.modes.items()},
        },
        f"{equal} of {len(same)} modes write the same {len(resident.tokens)} tokens",
        "MLX memory (MB)",
        f"Tokens from the first on that are the resident model's: {told}.",
        note=f"{runs.model}, {runs.plan.slots} slots, one greedy run of each mode",
        scale=1e-6,
    )


def memory_lines(runs: Runs):
    """Memory against slots: predicted, held once loaded, and the peak of the run."""
    planned, sizes = runs.plan, list(runs.slots)
    predicted = [planned.nbytes[s] / 1e6 for s in sizes]
    held = [run.held_nbytes / 1e6 for run in runs.slots.values()]
    peak = [run.peak_nbytes / 1e6 for run in runs.slots.values()]
    fig = style.figure(
        f"The memory is what was predicted, to {runs.error:.1%}",
        "slots in each layer (S)",
        "MLX memory (MB)",
        note=f"{runs.model}, one load and one greedy run for each point",
    )
    line, marker = style.look(0)["line"], [style.look(i)["marker"] for i in (1, 2)]
    fig.add_scatter(x=sizes, y=predicted, name="predicted", mode="lines", line=line)
    fig.add_scatter(x=sizes, y=held, name="held once loaded", mode="markers", marker=marker[0])
    fig.add_scatter(x=sizes, y=peak, name="peak of the run", mode="markers", marker=marker[1])
    fig.update_xaxes(type="log", tickvals=sizes)
    MB, allowed = planned.resident_nbytes / 1e6, planned.allowed_nbytes / 1e6
    style.ceiling(fig, MB, "every expert in memory")
    style.ceiling(fig, allowed, "allowed")
    i = sizes.index(planned.slots)
    return style.describe(
        fig,
        alt=f"MLX memory against slots. At {planned.slots} slots: {predicted[i]:.1f} MB predicted, "
        f"{held[i]:.1f} MB once loaded, {peak[i]:.1f} MB at the peak of the run. With every expert "
        f"in memory: {MB:.1f} MB.",
        finding=f"With {planned.slots} slots the run peaks at {peak[i]:.1f} MB of {allowed:.1f} MB "
        "allowed.",
    )


def dial(path, prompt: str, tokens: int):
    """The function behind two sliders: the model resident and streamed, drawn beside each other.

    Args:
        path (str or Path): A model folder.
        prompt (str): The text to continue.
        tokens (int): How many tokens to write at each move.

    Returns:
        Callable[[int, int], go.Figure]: From top-k and slots to a figure of memory and time.
    """
    plan = footprint(path, StreamConfig())

    def look(top_k: int, slots: int):
        resident = run(path, StreamConfig(mode="resident"), prompt, tokens)
        streamed = run(path, StreamConfig(top_k=top_k, slots=slots), prompt, tokens)
        return _memory_and_time(Path(path).name, plan, resident, streamed)

    return look


def _memory_and_time(name, plan, resident, streamed):
    config, runs = streamed.config, (resident, streamed)
    labels = ["resident", "streamed"]  # the same at every move: a live axis keeps its labels
    ms = [np.median(r.step_s) * 1e3 for r in runs]
    waiting = [0, min(streamed.wait_s * 1e3, ms[1])]
    MB, backbone = [r.held_nbytes / 1e6 for r in runs], plan.backbone_nbytes / 1e6
    lossy = config.top_k < plan.top_k
    told = " and ".join(quartiles_text(r.step_s, 1e3, ".3g") for r in runs)
    tokens = f"{streamed.same_tokens(resident)} of its {len(streamed.tokens)} tokens"
    warning = f" (top-k {config.top_k} in place of {plan.top_k} is lossy)" if lossy else ""
    return charts.parts(
        {
            "MLX memory once loaded (MB)": {
                label: {"all but the experts": backbone, "experts held": nbytes - backbone}
                for label, nbytes in zip(labels, MB)
            },
            "time of a token (ms)": {
                label: {"waiting for reads": wait, "the rest of a token": t - wait}
                for label, t, wait in zip(labels, ms, waiting)
            },
        },
        f"Top-k {config.top_k}, {config.slots} slots: {MB[1]:.1f} MB in place of {MB[0]:.1f}, "
        f"{ms[0] / ms[1]:.2f} of the resident speed",
        f"{streamed.hit_rate:.0%} of the experts were in a slot and "
        f"{streamed.bytes_per_token / 1e6:.2f} MB were read for a token; {tokens} are the resident "
        f"model's{warning}.",
        note=f"{name}, file in the page cache; ms of a token, median [quartiles]: {told}",
        axis="",
        scale=1,
    )


PROMPT, TOKENS, ALLOWED = "import os\n\n\ndef read_lines(path):\n", 96, 0.5


def main(out: str) -> None:
    """Writes the record of notebook 00: ``data/results/cpu_start_here.json``."""
    path = DATA / "models" / "tiny-moe"
    records.save(out, measure(path, plan(path, ALLOWED), PROMPT, TOKENS).record())


if __name__ == "__main__":
    main(sys.argv[1])

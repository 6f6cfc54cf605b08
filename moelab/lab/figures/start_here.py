"""Notebook 00: the memory of each mode, and whether it wrote the same text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from ... import StreamConfig, footprint
from ..experiments.start_here import Runs, run
from ..plots import charts, style
from ..timing import quartiles_text


def mode_bars(runs: Runs) -> go.Figure:
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


def memory_lines(runs: Runs) -> go.Figure:
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


def dial(path: str | Path, prompt: str, tokens: int) -> Callable[[int, int], go.Figure]:
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

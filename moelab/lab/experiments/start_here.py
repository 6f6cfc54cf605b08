"""One run of a model, measured: what it wrote, what each token took, what it held in memory."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from plotly.subplots import make_subplots

from ... import StreamConfig, footprint, load
from .. import decode as decode_loop
from ..plots import style as figures


@dataclass(frozen=True)
class Run:
    """A greedy run of one model.

    Attributes:
        config (StreamConfig): How it streamed.
        tokens (list[int]): What it wrote; an end of text does not stop it.
        text (str): The same, decoded.
        step_s (np.ndarray): Seconds of each token after the first, ``[T - 1]``.
        first_s (float): Seconds to the first token, the prompt's.
        wait_s (float): Seconds of an average token spent waiting for reads.
        hit_rate (float): Share of the needed experts that were in memory, decoding only; nan when resident.
        bytes_per_token (float): Bytes read for a token, decoding only.
        held_nbytes (int): MLX's memory for the model once loaded.
        peak_nbytes (int): The most that MLX held during the run, caches and activations included.
    """

    config: StreamConfig
    tokens: list
    text: str
    step_s: np.ndarray
    first_s: float
    wait_s: float
    hit_rate: float
    bytes_per_token: float
    held_nbytes: int
    peak_nbytes: int

    def same_tokens(self, other: "Run") -> int:
        """How many tokens from the first on are those of ``other``."""
        return next(
            (i for i, (a, b) in enumerate(zip(self.tokens, other.tokens)) if a != b),
            len(self.tokens),
        )


def decode(path, config: StreamConfig, prompt: str, tokens: int) -> Run:
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
        ran = decode_loop.decode(model, tokenizer.encode(prompt), tokens - 1)
    counted = ran["counters"]
    return Run(
        config=config,
        tokens=ran["tokens"],
        text=tokenizer.decode(ran["tokens"]),
        step_s=np.array(ran["step_s"]),
        first_s=ran["prefill_s"],
        wait_s=counted["wait_s"] / max(counted["tokens"], 1),
        hit_rate=counted["hit_rate"],
        bytes_per_token=counted["bytes_per_token"],
        held_nbytes=held,
        peak_nbytes=mx.get_peak_memory() - before,
    )


def dial(path, prompt: str, tokens: int):
    """Makes the function behind two sliders: it runs the model resident and streamed and draws both.

    Returns:
        Callable[[int, int], go.Figure]: From top-k and slots to a figure of memory and time.
    """

    def look(top_k: int, slots: int):
        resident = decode(path, StreamConfig(mode="resident"), prompt, tokens)
        streamed = decode(path, StreamConfig(top_k=top_k, slots=slots), prompt, tokens)
        return _memory_and_time(path, resident, streamed)

    return look


def _memory_and_time(path, resident: Run, streamed: Run):
    config = streamed.config
    plan = footprint(path, StreamConfig())
    where = [f"resident, top-k {plan.top_k}", f"{config.slots} slots, top-k {config.top_k}"]
    mb, ms = (
        [r.held_nbytes / 1e6 for r in (resident, streamed)],
        [np.median(r.step_s) * 1e3 for r in (resident, streamed)],
    )
    waiting = [0, min(streamed.wait_s * 1e3, ms[1])]
    same = streamed.same_tokens(resident)
    ratio = ms[0] / ms[1]

    fig = figures.figure(
        f"Top-k {config.top_k}, {config.slots} slots: {mb[1]:.1f} MB in place of {mb[0]:.1f}, {ratio:.2f} of the resident speed",
        x="",
        y="",
        note=f"{Path(path).name}, {len(streamed.step_s)} tokens each after the first, file in the page cache; bars: medians, whiskers: quartiles",
        barmode="stack",
    )
    make_subplots(1, 2, figure=fig, horizontal_spacing=0.14)
    fig.update_yaxes(title="MLX memory once loaded (MB)", col=1).update_yaxes(
        title="time for a token (ms)", col=2
    )
    backbone = plan.backbone_nbytes / 1e6
    series = [
        ("all but the experts", [backbone, backbone], 1, figures.GREY, ""),
        ("experts held", [m - backbone for m in mb], 1, figures.COLORS[0], "/"),
        ("computing", [ms[0], ms[1] - waiting[1]], 2, figures.COLORS[4], ""),
        ("waiting for reads", waiting, 2, figures.COLORS[1], "x"),
    ]
    for name, heights, column, color, pattern in series:
        fig.add_bar(
            x=where,
            y=heights,
            name=name,
            marker=dict(
                color=color, pattern=dict(shape=pattern, fgcolor="white", fillmode="overlay")
            ),
            width=0.55,
            row=1,
            col=column,
        )
    quartiles = np.array([np.percentile(r.step_s, (25, 75)) for r in (resident, streamed)]).T * 1e3
    fig.data[-1].error_y = dict(
        type="data", array=quartiles[1] - ms, arrayminus=ms - quartiles[0], thickness=1.5, width=5
    )

    lossy = config.top_k < plan.top_k
    text = f"{same} of its {len(streamed.tokens)} tokens are the resident model's" + (
        f" (top-k {config.top_k} in place of {plan.top_k} is lossy)." if lossy else "."
    )
    found = f"{streamed.hit_rate:.0%} of the experts were in their slot; {streamed.bytes_per_token / 1e6:.2f} MB were read for a token"
    return figures.describe(
        fig,
        alt=f"Two bar charts, resident against streamed. Memory: {mb[0]:.1f} and {mb[1]:.1f} MB. Time for a token: {ms[0]:.1f} ms, and "
        f"{ms[1]:.1f} ms of which {waiting[1]:.1f} are spent waiting for reads.",
        finding=f"{found}; {text}",
    )

"""One MoE layer with every expert in its slot: what streaming costs when nothing is read."""

import argparse
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from ... import StreamConfig, close, load, stats
from ...commands.arguments import add_json, add_model, add_number
from ...commands.stream_options import (
    MEASURED_SLOTS,
    add_modes,
    add_stream_options,
    modes_given,
    parse_modes,
)
from ...streaming.layers import StreamedExperts
from ...streaming.session import session_of
from .. import cite, machine, records
from ..models import folder
from .bench import resident_like

if TYPE_CHECKING:
    from pandas import DataFrame, Series

EVALUATION = "one evaluation"  # of one small operation


def bench_layer(
    path: str | Path,
    modes: str | Mapping[str, StreamConfig] = "stacked,fused",
    base: StreamConfig | None = None,
    rounds: int = 200,
    seed: int = 0,
) -> "DataFrame":
    """Time the first MoE block with every expert in its slot, against the same block resident.

    A streamed layer must tell the host which experts it needs, so it cannot cost less than the
    resident layer's evaluation and one more. The block is router, experts and shared expert.

    Args:
        path (str or Path): The model.
        modes (str or Mapping): As for ``parse_modes``; or configs by name.
        base (StreamConfig): What the modes have in common. The resident block has its dtype and
            top-k.
        rounds (int): Timed, in random order.
        seed (int): Of the input and of the orders.

    Returns:
        DataFrame: ``call_s`` by ``variant`` and ``round``, of the block in each mode and of
        ``EVALUATION``; ``misses`` of the call: none if every expert stayed in its slot.
    """
    path = folder(path)
    configs = parse_modes(modes, base) if isinstance(modes, str) else modes
    configs = {"resident": resident_like(base), **configs}
    settings = {"model": path.name, "baseline": "resident"}
    small, variants, models, x = mx.zeros((8,)), {}, [], None
    try:
        for name, config in configs.items():
            models.append(model := load(path, config)[0])
            if x is None:
                x = mx.random.normal((1, 1, _width(model)), key=mx.random.key(seed))
                x = x.astype(session_of(model).dtype)
                mx.eval(x, small)
            variants[name] = partial(_call, model, _first_block(model), x)
        variants[EVALUATION] = partial(_call, None, lambda x: x + 1, small)
        warmup = max(3, rounds // 10)  # brings the experts of x into their slots
        return records.interleave("layer", variants, rounds, settings, warmup, seed, progress=False)
    finally:
        for model in models:
            close(model)


def _call(model, block, x, _):
    begin = time.perf_counter()
    mx.eval(block(x))
    row = {"call_s": time.perf_counter() - begin}
    return row if model is None else row | {"misses": stats(model, reset=True).decode.misses}


def block_ratio(samples: "DataFrame", mode: str) -> "Series":
    """A mode's block over the resident block and one evaluation, by round."""
    mine, *baseline = (
        records.values(samples, name, "call_s") for name in (mode, "resident", EVALUATION)
    )
    return mine / sum(baseline)


def _first_block(model) -> nn.Module:
    """The module that calls the first experts."""
    modules = dict(model.named_modules())
    for path, module in reversed(list(modules.items())):
        if isinstance(module, (SwitchGLU, SwitchMLP, StreamedExperts)):
            return modules[path.rpartition(".")[0]]
    raise ValueError("the model has no experts")


def _width(model) -> int:
    """D, from the embedding, which may be quantized."""
    for path, module in model.named_modules():
        if path.endswith("embed_tokens"):
            return module.weight.shape[1] * (32 // module.bits if hasattr(module, "bits") else 1)
    raise ValueError("the model has no embed_tokens")


def report(samples: "DataFrame") -> str:
    """Timings and ratios as text."""
    lines = [
        machine.card_line(samples.attrs["machine"]),
        f"{samples.attrs['settings']['model']}: one MoE block, every expert in its slot",
    ]
    for name in dict.fromkeys(samples.variant):
        call_s = records.values(samples, name, "call_s")
        line = f"{name}: {cite.q(call_s, '.3g', 1e3)} ms, n={len(call_s)}"
        if name not in ("resident", EVALUATION):
            misses = records.values(samples, name, "misses").sum()
            line += f"; {cite.q(block_ratio(samples, name))} of resident + one evaluation"
            line += f"; misses while timed: {misses:.0f}"
        lines.append(line)
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Time one MoE layer with every expert in its slot, against the same layer resident and "
        "one evaluation of one small operation."
    )
    add_model(parser)
    add_modes(parser, "stacked,fused")
    add_number(parser, "--runs", 200, "rounds")
    add_json(parser)
    add_stream_options(parser, MEASURED_SLOTS)


def run(args: argparse.Namespace) -> None:
    """The command."""
    base, configs = modes_given(args)
    samples = bench_layer(args.model, configs, base, args.runs)
    records.print_and_save(report(samples), samples, args.json)

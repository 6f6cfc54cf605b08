"""One MoE layer with every expert in its slot: what streaming costs when nothing is read."""

import argparse
from collections.abc import Mapping
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
from .. import machine, records, timing
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
        DataFrame: ``call_s`` of every round, of the block in each mode and of ``EVALUATION``. The
        header has ``misses_while_timed`` by mode: 0 if every expert stayed in its slot.
    """
    path = folder(path)
    configs = parse_modes(modes, base) if isinstance(modes, str) else modes
    configs = {"resident": resident_like(base), **configs}
    warmup = max(3, rounds // 10)
    settings = {"model": path.name, "warmup_rounds": warmup, "baseline": "resident"}
    running = records.Running("layer", settings)
    variants, models, x = {}, {}, None
    try:
        for name, config in configs.items():
            model = models[name] = load(path, config)[0]
            if x is None:
                shape = (1, 1, _width(model))
                x = mx.random.normal(shape, key=mx.random.key(seed))
                x = x.astype(session_of(model).dtype)
                mx.eval(x)
            variants[name] = _evaluation(_first_block(model), x)
            variants[name]()  # brings the experts of x into their slots
        small = mx.zeros((8,))
        mx.eval(small)
        variants[EVALUATION] = lambda: mx.eval(small + 1)
        timings = timing.interleave(variants, rounds, n_warmup=warmup, seed=seed)
        # The call before the clock missed the K experts of x.
        misses = {
            name: max(0, stats(model).decode.misses - session_of(model).top_k)
            for name, model in models.items()
            if name != "resident"
        }
    finally:
        for model in models.values():
            close(model)
    rows = [
        {"variant": name, "round": i, "call_s": timings[name].samples_s[i]}
        for i in range(rounds)
        for name in variants
    ]
    return running.table(rows, misses_while_timed=misses)


def block_ratio(samples: "DataFrame", mode: str) -> "Series":
    """A mode's block over the resident block and one evaluation, by round."""
    mine, *baseline = (
        records.values(samples, name, "call_s") for name in (mode, "resident", EVALUATION)
    )
    return mine / sum(baseline)


def _evaluation(block, x):
    return lambda: mx.eval(block(x))


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
    for name, rows in samples.groupby("variant", sort=False):
        lines.append(str(timing.Timing(name, tuple(rows.call_s))))
    for name, misses in samples.attrs["misses_while_timed"].items():
        ratio = timing.quartiles_text(block_ratio(samples, name))
        lines.append(
            f"{name} / (resident + one evaluation) = {ratio}; misses while timed: {misses}"
        )
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

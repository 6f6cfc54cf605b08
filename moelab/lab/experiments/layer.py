"""One MoE layer with every expert in its slot: what streaming costs when nothing is read."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from ... import close, load, stats
from ...streaming.model import session_of
from .. import machine, timing
from .bench import parse_modes, resident_like


def bench_layer(path, modes="stacked,fused", base=None, rounds=200, seed=0):
    """One MoE block with every expert in its slot, against the same block resident, and one evaluation of one small operation.

    A streamed layer must tell the host which experts it needs, so it cannot cost less than the resident layer's
    evaluation and one more. The block is the first one's: router, experts, shared expert.

    Args:
        path (str): The model.
        modes (str or dict): As for ``parse_modes``; or configs by name.
        base (StreamConfig): What the modes have in common. The resident block has its dtype and top-k.
        rounds (int): Timed rounds, in random order.

    Returns:
        dict: Timings by variant and, for each mode, ``ratio``: its time over resident plus one evaluation, round by round.
    """
    configs = parse_modes(modes, base) if isinstance(modes, str) else modes
    configs = {"resident": resident_like(base), **configs}
    variants, models = {}, []
    x = None
    for name, config in configs.items():
        model, _ = load(path, config)
        models.append(model)
        block = _first_block(model)
        if x is None:
            D = _width(model)
            x = mx.random.normal((1, 1, D), key=mx.random.key(seed)).astype(session_of(model).dtype)
            mx.eval(x)

        def call(block=block):
            mx.eval(block(x))

        call()  # brings the experts of x into their slots
        variants[name] = call
    small = mx.zeros((8,))
    mx.eval(small)
    variants["one evaluation"] = lambda: mx.eval(small + 1)
    try:
        timings = timing.interleave(
            variants, rounds, n_warmup=max(3, rounds // 10), seed=seed, cache_state="none"
        )
        hits = {n: stats(m).decode for n, m in zip(configs, models)}
    finally:
        for model in models:
            close(model)
    yard = np.add(timings["resident"].samples_s, timings["one evaluation"].samples_s)
    return {
        "kind": "layer",
        "model": Path(path).name,
        "machine": machine.card(),
        "timings": timings,
        "misses_while_timed": {
            n: max(0, c.misses - _needed(m))
            for (n, c), m in zip(hits.items(), models)
            if n != "resident"
        },
        "ratio": {n: timing.paired_ratio(timings[n], yard) for n in configs if n != "resident"},
    }


def _needed(model):
    return session_of(model).top_k


def _first_block(model):
    """The module that calls the first experts: router, experts, shared expert."""
    modules = dict(model.named_modules())
    for path, module in reversed(list(modules.items())):
        if (
            hasattr(module, "table")
            or hasattr(module, "_banks")
            or type(module).__name__ in ("SwitchGLU", "SwitchMLP", "Serial")
        ):
            return modules[path.rpartition(".")[0]]
    raise ValueError("the model has no experts")


def _width(model):
    for path, module in model.named_modules():
        if path.endswith("embed_tokens"):
            return module.weight.shape[1] * (32 // module.bits if hasattr(module, "bits") else 1)
    raise ValueError("the model has no embed_tokens")


def report_layer(record):
    lines = [
        machine.card_line(record["machine"]),
        f"{record['model']}: one MoE block, every expert in its slot",
    ]
    lines += [str(t) for t in record["timings"].values()]
    for name, r in record["ratio"].items():
        lines.append(
            f"{name} / (resident + one evaluation) = {timing.quartiles_text(r)}; misses while timed: {record['misses_while_timed'][name]}"
        )
    return "\n".join(lines)

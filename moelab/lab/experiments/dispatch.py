"""Notebook 01: what a decoded token costs besides arithmetic.

Operations sent, results that the host waits for, and one stray type. Every measurement runs on the
device that MLX uses; notebook 01 and the recorded CUDA run call the same ones.
"""

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ...experts import expert_modules
from ...hooks import hooked
from .. import records
from ..timing import Timing, interleave, paired_ratio

# D hidden, F expert hidden, K experts per token.
SHAPES = {
    "tiny-moe": {"D": 256, "F": 128, "K": 8},
    "qwen3.5-35b-a3b": {"D": 2048, "F": 512, "K": 8},
    "qwen3.5-122b-a10b": {"D": 3072, "F": 1024, "K": 8},
    "qwen3.5-397b-a17b": {"D": 4096, "F": 1024, "K": 10},
}
BITS, GROUP = 4, 64  # of the quantized weights: each group has a scale and a bias of 16 bits
# Operations that only change how memory is seen; they run no kernel.
VIEWS = {
    "Broadcast",
    "Reshape",
    "Transpose",
    "Slice",
    "Squeeze",
    "ExpandDims",
    "Flatten",
    "Unflatten",
    "Split",
    "AsStrided",
    "View",
    "Depends",
    "StopGradient",
}
# The variants that charts and verdicts name; recorded runs have the same names.
K_CALLS, ONE_GATHER, FUSED = "K calls a projection", "one gather a projection", "gate and up fused"
AHEAD, NOT_AHEAD = "next token scheduled ahead", "every token read, then the next"
LOCK, NO_STREAM = "ahead, a lock around evaluation", "ahead, no stream context"
ROUTING_READ = "every layer's routing read"
CLEAN, STRAY = "as it is", "one float32 scalar"
ALONE, LONG = "one operation a command buffer", "1000 operations a command buffer"


@dataclass(frozen=True)
class Timed:
    """What one experiment timed.

    Attributes:
        config (dict): Sizes and settings.
        timings (dict[str, Timing]): By the name of the variant.
    """

    config: dict[str, Any]
    timings: dict[str, Timing]

    @classmethod
    def measure(
        cls, variants: dict[str, Callable], rounds: int, n_warmup: int, config: dict
    ) -> "Timed":
        """Times the variants as ``interleave`` does, in rounds of random order."""
        return cls(config, interleave(variants, rounds, n_warmup=n_warmup, config=config))

    @classmethod
    def parse(cls, section: dict) -> "Timed":
        """From a section of a record."""
        timings = {name: Timing(**t) for name, t in section["timings"].items()}
        return cls(section["config"], timings)

    @property
    def samples(self) -> dict[str, np.ndarray]:
        """``{variant: seconds of each round}``."""
        return {name: np.asarray(t.samples_s) for name, t in self.timings.items()}

    def median_s(self, name: str) -> float:
        """Median seconds of one variant."""
        return self.timings[name].median_s

    def ratio(self, over: str, under: str) -> float:
        """Quotient of two variants, the median over rounds."""
        return paired_ratio(self.timings[over], self.timings[under])["median"]


def default_dtype() -> mx.Dtype:
    """float32 on the CPU backend, where half precision is far slower; bfloat16 on a GPU."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


# One operation


def one_operation(count: int = 400, rounds: int = 20) -> Timed:
    """Seconds of one small operation, 8 floats plus one.

    ``built`` is Python alone: the graph is made and dropped. ``chained`` divides the evaluation of
    a chain by its length. ``scheduled`` sends each without waiting; ``evaluated`` waits for each.

    Args:
        count (int): Operations in the chain.
        rounds (int): Samples of each variant.
    """
    x = mx.zeros((8,))
    one = mx.ones((8,))
    mx.eval(x, one)

    def run(each, at_end):
        def timed():
            y = x
            begin = time.perf_counter()
            for _ in range(count):
                y = y + one
                each(y)
            at_end(y)
            return (time.perf_counter() - begin) / count

        return timed

    nothing = lambda y: None  # noqa: E731
    variants = {
        "built": run(nothing, nothing),
        "chained": run(nothing, mx.eval),
        "scheduled": run(mx.async_eval, mx.eval),
        "evaluated": run(mx.eval, nothing),
    }
    return Timed.measure(variants, rounds, 3, {"count": count})


# The experts of one layer


def _quantized(shape, dtype):
    w, *parameters = mx.quantize(mx.random.normal(shape) / np.sqrt(shape[-1]), GROUP, BITS)
    w = (w, *(p.astype(dtype) for p in parameters))
    mx.eval(w)
    return w


def expert_calls(
    D: int,
    F: int,
    K: int,
    E: int | None = None,
    layers: int = 8,
    rounds: int = 20,
    dtype: mx.Dtype | None = None,
    seed: int = 0,
) -> Timed:
    """Seconds of one layer's experts at decode, computed in four ways.

    K calls for each projection, one gather for each, gate and up in one array; and ``dense``, an
    MLP of hidden size K*F: the same arithmetic and the same bytes without routing, the floor.

    Args:
        D, F, K (int): Hidden size, expert hidden size, experts per token.
        E (int): Experts in memory. Default: 4 K.
        layers (int): Layers in one evaluation, each on the output of the one before.
        rounds (int): Samples of each variant.
        dtype (mx.Dtype): Of activations, scales and biases. Default: ``default_dtype()``.
        seed (int): Of weights and routing.
    """
    mx.random.seed(seed)
    dtype, E = dtype or default_dtype(), E or 4 * K
    gate, up, down = (_quantized(s, dtype) for s in ((E, F, D), (E, F, D), (E, D, F)))
    both = tuple(mx.concatenate([g, u], axis=1) for g, u in zip(gate, up))
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(E, K, replace=False) for _ in range(layers)]
    indices = [mx.array(c.astype(np.uint32)[None, None]) for c in chosen]
    single = {
        e: [tuple(mx.contiguous(a[int(e)]) for a in p) for p in (gate, up, down)]
        for e in {int(e) for c in chosen for e in c}
    }
    wide = [tuple(mx.contiguous(a[:K].reshape(K * F, -1)) for a in p) for p in (gate, up)]
    wide.append(_quantized((D, K * F), dtype))
    x0 = mx.random.normal((1, 1, D)).astype(dtype)
    mx.eval(both, indices, single, wide, x0)

    def qmm(x, w):
        return mx.quantized_matmul(x, *w, transpose=True, group_size=GROUP, bits=BITS)

    def gather(x, w, i):
        return mx.gather_qmm(x, *w, rhs_indices=i, transpose=True, group_size=GROUP, bits=BITS)

    def separate(x, i, c):
        ys = []
        for e in c:
            g, u, d = single[int(e)]
            ys.append(qmm(nn.silu(qmm(x, g)) * qmm(x, u), d))
        return mx.concatenate(ys, axis=1).sum(axis=1, keepdims=True)

    def stacked(x, i, c):
        x = mx.expand_dims(x, (-2, -3))
        return (
            gather(nn.silu(gather(x, gate, i)) * gather(x, up, i), down, i).squeeze(-2).sum(axis=-2)
        )

    def fused(x, i, c):
        g, u = mx.split(gather(mx.expand_dims(x, (-2, -3)), both, i), 2, axis=-1)
        return gather(nn.silu(g) * u, down, i).squeeze(-2).sum(axis=-2)

    def dense(x, i, c):
        return qmm(nn.silu(qmm(x, wide[0])) * qmm(x, wide[1]), wide[2])

    def run(layer):
        def timed():
            x = x0
            begin = time.perf_counter()
            for i, c in zip(indices, chosen):
                x = x + layer(x, i, c)
            mx.eval(x)
            return (time.perf_counter() - begin) / layers

        return timed

    variants = {
        K_CALLS: run(separate),
        ONE_GATHER: run(stacked),
        FUSED: run(fused),
        "dense": run(dense),
    }
    config = {"D": D, "F": F, "K": K, "E": E, "layers": layers, "dtype": str(dtype)}
    return Timed.measure(variants, rounds, 3, {**config, "nbytes": K * 3 * D * F * 9 // 16})


# Operations counted


def operations(*arrays: mx.array) -> dict[str, int]:
    """How many operations of each kind the evaluation of ``arrays`` runs, ``{name: count}``.

    Views are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        dot = Path(folder) / "graph.dot"
        mx.export_to_dot(str(dot), *arrays)
        labels = re.findall(r'\[label ="([^"]*)", shape=rectangle\]', dot.read_text())
    names = {}
    for name in labels:
        if name not in VIEWS:
            names[name] = names.get(name, 0) + 1
    return names


def operations_of_a_layer(model: nn.Module) -> list[dict[str, int]]:
    """The operations of each layer in one decoded token, ``{name: count}`` for each layer."""
    inner = next(
        m for _, m in model.named_modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens")
    )
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=cache), [c.state for c in cache])
    out = []
    D = inner.norm.weight.shape[0]
    for layer, c in zip(inner.layers, cache):
        x = mx.zeros((1, 1, D), inner.norm.weight.dtype)
        mx.eval(x)
        out.append(operations(layer(x, None, c)))
    return out


def dense_and_moe(
    D: int = 2048,
    F: int = 512,
    K: int = 8,
    E: int = 32,
    layers: int = 8,
    vocab: int = 8192,
    dtype: mx.Dtype | None = None,
    seed: int = 0,
) -> dict[str, nn.Module]:
    """Two random 4-bit models that differ in their MLPs alone: Qwen3 with one of K*F, Qwen3-MoE.

    For each token both compute as much and touch as many bytes.

    Args:
        D, F, K, E (int): Hidden size, expert hidden size, experts per token, experts.
        layers (int): Layers of each.
        vocab (int): Entries of the vocabulary.
        dtype (mx.Dtype): Of activations. Default: ``default_dtype()``.
        seed (int): Of the weights.

    Returns:
        dict[str, nn.Module]: ``dense`` and ``moe``.
    """
    from mlx_lm.models import qwen3, qwen3_moe

    mx.random.seed(seed)
    common = {
        "hidden_size": D,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, D // 128),
        "num_key_value_heads": max(1, D // 512),
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "intermediate_size": K * F,
    }
    experts = {
        "num_experts": E,
        "num_experts_per_tok": K,
        "moe_intermediate_size": F,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    dense = qwen3.ModelArgs(model_type="qwen3", **common)
    moe = qwen3_moe.ModelArgs(model_type="qwen3_moe", **experts, **common)
    models = {"dense": qwen3.Model(dense), "moe": qwen3_moe.Model(moe)}
    for model in models.values():
        model.set_dtype(dtype or default_dtype())
        nn.quantize(model, GROUP, BITS)
        for layer in model.layers:  # one at a time: unquantized it takes eight times the memory
            mx.eval(layer.parameters())
        mx.eval(model.parameters())
        model.eval()
    return models


# Loops


@contextmanager
def hooked_experts(model: nn.Module, hook: Callable, only: slice = slice(None)) -> Iterator[None]:
    """Within, ``hook(call, x, indices)`` stands for the call of the chosen layers' experts."""
    with ExitStack() as stack:
        for _, experts in expert_modules(model)[only]:
            stack.enter_context(hooked(experts, hook))
        yield


def before(listen: Callable[[mx.array, mx.array], Any]) -> Callable:
    """A hook that calls ``listen(x, indices)`` before a layer's experts."""

    def hook(call, x, indices):
        listen(x, indices)
        return call(x, indices)

    return hook


def loop(
    model: nn.Module,
    tokens: int,
    ids: Sequence[int] = (1, 2, 3, 4),
    ahead: bool = True,
    lock: AbstractContextManager | None = None,
    stream: mx.Stream | None = generation_stream,
) -> float:
    """Seconds of a decoded token: greedy, the clock running with nothing in flight at either end.

    Not ``lab.decode``, because the loop itself is what is measured.

    Args:
        model (nn.Module): What decodes.
        tokens (int): How many tokens to time.
        ids (Sequence[int]): The prompt.
        ahead (bool): Schedule the next token before reading this one, as mlx-lm does; else read
            first.
        lock (Lock): Taken around every evaluation. Default: none.
        stream (Stream): Of the generation. ``None``: the default stream, no context.
    """
    lock = lock or nullcontext()
    cache = make_prompt_cache(model)
    with mx.stream(stream) if stream is not None else nullcontext():

        def step(y):
            return mx.argmax(model(y[None], cache=cache)[:, -1, :], axis=-1)

        y = step(mx.array(ids))
        mx.eval(y)
        begin = time.perf_counter()
        if ahead:
            y = step(y)
            with lock:
                mx.async_eval(y)
            for _ in range(tokens - 1):
                following = step(y)
                with lock:
                    mx.async_eval(following)
                with lock:
                    y.item()
                y = following
            with lock:
                y.item()
        else:
            for _ in range(tokens):
                y = step(y)
                with lock:
                    y.item()
        return (time.perf_counter() - begin) / tokens


def loops(
    model: nn.Module,
    tokens: int = 64,
    rounds: int = 7,
    routing: bool = True,
    config: dict | None = None,
) -> Timed:
    """Seconds of a token in variants of one decode loop: what it waits for, locks, or names.

    Args:
        model (nn.Module): Resident.
        tokens (int): Decoded in each run.
        rounds (int): Runs of each variant.
        routing (bool): Also the variants that touch every layer's routing; False for a dense model.
        config (dict): Kept with the samples.
    """
    lock = threading.RLock()
    fresh = mx.new_stream(mx.default_device())
    variants = {
        AHEAD: lambda: loop(model, tokens),
        NOT_AHEAD: lambda: loop(model, tokens, ahead=False),
        LOCK: lambda: loop(model, tokens, lock=lock),
        NO_STREAM: lambda: loop(model, tokens, stream=None),
        "ahead, a stream of its own": lambda: loop(model, tokens, stream=fresh),
    }

    def listening(listen):
        def timed():
            with hooked_experts(model, before(listen)):
                return loop(model, tokens)

        return timed

    if routing:
        variants |= {
            ROUTING_READ: listening(lambda x, i: np.array(i)),
            "every layer's routing scheduled": listening(lambda x, i: mx.async_eval(i)),
            "every layer's input evaluated": listening(lambda x, i: mx.eval(x)),
        }
    return Timed.measure(variants, rounds, 2, {"tokens": tokens, **(config or {})})


def promotion(
    model: nn.Module, tokens: int = 32, rounds: int = 5, config: dict | None = None
) -> Timed:
    """Seconds of a token of a half-precision model, with and without a float32 scalar in it.

    The scalar multiplies the first MoE layer's output: it and all that follows become float32.

    Args:
        model (nn.Module): Resident, with at least two MoE layers.
        tokens (int): Decoded in each run.
        rounds (int): Runs of each variant.
        config (dict): Kept with the samples, beside ``dtype_in_the_last_layer``.

    Raises:
        ValueError: If there are fewer MoE layers.
    """
    if (count := len(expert_modules(model))) < 2:
        raise ValueError(f"expected at least 2 MoE layers, got {count}")
    scalar, seen = mx.array(1.0, mx.float32), set()

    def multiply(call, x, indices):
        return call(x, indices) * scalar

    def timed():
        listen = before(lambda x, i: seen.add(str(x.dtype)))
        with (
            hooked_experts(model, multiply, slice(1)),
            hooked_experts(model, listen, slice(count - 1, count)),
        ):
            return loop(model, tokens)

    config = {"tokens": tokens, **(config or {})}
    timed = interleave(
        {CLEAN: lambda: loop(model, tokens), STRAY: timed}, rounds, n_warmup=1, config=config
    )
    return Timed({**config, "dtype_in_the_last_layer": sorted(seen)}, timed)


# The recorded run


@dataclass(frozen=True)
class Recorded:
    """The sections of a recorded CUDA run that notebook 01 shows.

    Attributes:
        machine (dict): Its card.
        operation (Timed): ``one_operation``.
        experts (dict[str, Timed]): ``expert_calls`` by the name of the shape.
        loops (Timed): Of the checkpoint of 35B-A3B layers.
        layer_operations (list[int]): Operations of each of its layers.
        settings (dict[str, dict[str, Timed]]): ``loops`` of ``dense`` and ``moe`` by MLX's setting.
        operations (dict[str, int]): Operations in a layer of ``dense`` and of ``moe``.
        promotion (Timed): Of a later run on another host with the same GPU.
        promotion_machine (dict): The card of that run.
    """

    machine: dict[str, Any]
    operation: Timed
    experts: dict[str, Timed]
    loops: Timed
    layer_operations: list[int]
    settings: dict[str, dict[str, Timed]]
    operations: dict[str, int]
    promotion: Timed
    promotion_machine: dict[str, Any]

    @property
    def name(self) -> str:
        """What charts call it."""
        return f"{self.machine['gpu']}, recorded"


def recorded(name: str = "cuda_h200", later: str = "cuda_h200_engine") -> Recorded:
    """Parses two records of ``data/recipes/cuda_run.py``; the later one has ``promotion``."""
    record, promoted = records.recorded(name), records.recorded(later)
    sections = record["sections"]
    both = sections["dense_and_moe"]
    both = {k: v for k, v in both.items() if isinstance(v, dict) and "moe" in v}
    looped = sections["loops_of_the_checkpoint"]
    count = {n: m["operations_of_a_layer"] for n, m in both[CLEAN].items()}
    return Recorded(
        machine=record["machine"],
        operation=Timed.parse(sections["one_operation"]),
        experts={k: Timed.parse(v) for k, v in sections["expert_calls"].items() if k in SHAPES},
        loops=Timed.parse(looped),
        layer_operations=[sum(o.values()) for o in looped["operations_of_a_layer"]],
        settings={k: {n: Timed.parse(m) for n, m in v.items()} for k, v in both.items()},
        operations={n: sum(o.values()) for n, o in count.items()},
        promotion=Timed.parse(promoted["sections"]["promotion"]),
        promotion_machine=promoted["machine"],
    )


def alone_slowdown(gpu: Recorded) -> dict[str, float]:
    """How many times slower ``dense`` and ``moe`` are when every operation is submitted alone."""
    return {
        n: gpu.settings[ALONE][n].median_s(AHEAD) / gpu.settings[CLEAN][n].median_s(AHEAD)
        for n in ("dense", "moe")
    }


# What the sources' own figures say

PR90_LAYERS, PR90_TOP_K = 48, 6


def implied_call_us() -> dict[str, float]:
    """Microseconds saved for each call saved, by the speeds that PR 90 reports."""
    speeds = records.PUBLISHED["PR 90"]
    saved = {"stacked": 3 * PR90_TOP_K - 3, "fused": 3 * PR90_TOP_K - 2}
    saved["stacked, by its own percentage"] = saved["stacked"]
    return {
        step: (1 / speeds["buffers"] - 1 / speeds[step]) * 1e6 / (PR90_LAYERS * calls)
        for step, calls in saved.items()
    }


def implied_operation_us(gpu: Recorded) -> dict[str, float]:
    """Microseconds lost for each operation in the two models of issue 124, by its own speeds."""
    told, mean = records.PUBLISHED["issue 124"], np.mean(gpu.layer_operations)
    sent = {
        "dense": told["dense layers"] * gpu.operations["dense"],
        "moe": told["moe layers"] * mean,
    }
    return {n: (1 / told[f"{n}, Swift"] - 1 / told[f"{n}, Python"]) / sent[n] * 1e6 for n in sent}


# A model to explore


def token_model(
    calls: int,
    layers: int,
    dispatch_us: float,
    other_operations: int,
    bytes_per_layer: float,
    GBs: float,
) -> float:
    """Seconds of a token that is bound by dispatch or by bandwidth, whichever is slower.

    Args:
        calls (int): Calls of a layer's experts.
        layers (int): L.
        dispatch_us (float): Microseconds of one operation in a chain.
        other_operations (int): Operations of a layer besides its experts'.
        bytes_per_layer (float): Of the experts that a token uses.
        GBs (float): Memory bandwidth in GB/s.
    """
    send_s = layers * (calls + other_operations) * dispatch_us * 1e-6
    move_s = layers * bytes_per_layer / (GBs * 1e9)
    return max(send_s, move_s)

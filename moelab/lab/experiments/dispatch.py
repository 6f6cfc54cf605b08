"""What a decoded token costs besides arithmetic: sending, waiting, one stray type.

    python -m moelab.lab dispatch operation OUT.json          one small operation
    python -m moelab.lab dispatch experts OUT.json            a layer's experts in fewer calls
    python -m moelab.lab dispatch buffers OUT.json            MLX's settings of command buffers
    python -m moelab.lab dispatch count OUT.json MODEL        operations of each layer, counted
    python -m moelab.lab dispatch loops OUT.json MODEL        what a decode loop waits for
    python -m moelab.lab dispatch scalar OUT.json MODEL       one float32 scalar in half precision

Each runs on the device that MLX uses. Notebook 01 shows them.
"""

import os
import re
import tempfile
import threading
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models import qwen3, qwen3_moe
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, load
from ...experts import expert_modules
from ...hooks import hooked
from .. import charts, limit, records
from ..models import folder

if TYPE_CHECKING:
    from pandas import DataFrame

# D hidden, F expert hidden, K experts per token.
SHAPES = {
    "tiny-moe": {"D": 256, "F": 128, "K": 8},
    "qwen3.5-35b-a3b": {"D": 2048, "F": 512, "K": 8},
    "qwen3.5-122b-a10b": {"D": 3072, "F": 1024, "K": 8},
    "qwen3.5-397b-a17b": {"D": 4096, "F": 1024, "K": 10},
}
BITS, GROUP = 4, 64  # quantized weights: each group has a scale and a bias of 16 bits
# Operations that only change how memory is seen; they run no kernel.
VIEWS = re.compile(
    "Broadcast|Reshape|Transpose|Slice|Squeeze|ExpandDims|Flatten|Unflatten|Split|AsStrided|View|"
    "Depends|StopGradient"
)
# The variants, as charts and claims name them.
K_CALLS, ONE_GATHER, FUSED = "K calls a projection", "one gather a projection", "gate and up fused"
AHEAD, NOT_AHEAD = "next token scheduled ahead", "every token read, then the next"
ROUTING_READ = "every layer's routing read"
PLAIN, STRAY = "as it is", "one float32 scalar"
SETTINGS = {  # MLX reads settings of command buffers once, so each has a process of its own
    PLAIN: {},
    "1 a buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "5 a buffer": {"MLX_MAX_OPS_PER_BUFFER": "5"},
    "1000 a buffer": {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "100000"},
    "no CUDA graphs": {"MLX_USE_CUDA_GRAPHS": "0"},
}


def default_dtype() -> mx.Dtype:
    """float32 on the CPU backend, where half precision is far slower; bfloat16 on a GPU."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


# One operation


def one_operation(count: int = 400, rounds: int = 20) -> "DataFrame":
    """Seconds of one small operation, 8 floats plus one.

    ``built`` is Python alone: the graph is made and dropped. ``chained`` divides the evaluation of
    a chain by its length. ``scheduled`` sends each without waiting; ``evaluated`` waits for each.
    """
    x = mx.zeros((8,))
    one = mx.ones((8,))
    mx.eval(x, one)

    def run(each, at_end, _):
        y = x
        begin = time.perf_counter()
        for _ in range(count):
            y = y + one
            each(y)
        at_end(y)
        return {"operation_s": (time.perf_counter() - begin) / count}

    nothing = lambda y: None  # noqa: E731
    variants = {
        "built": partial(run, nothing, nothing),
        "chained": partial(run, nothing, mx.eval),
        "scheduled": partial(run, mx.async_eval, mx.eval),
        "evaluated": partial(run, mx.eval, nothing),
    }
    return records.interleave(
        "operation", variants, rounds, {"count": count}, warmup=3, progress=False
    )


# The experts of one layer


def _quantized(shape, dtype):
    w, *parameters = mx.quantize(mx.random.normal(shape) / np.sqrt(shape[-1]), GROUP, BITS)
    w = (w, *(p.astype(dtype) for p in parameters))
    mx.eval(w)
    return w


def expert_calls(
    shapes: Iterable[str] = tuple(SHAPES),
    E: int | None = None,
    layers: int = 8,
    rounds: int = 20,
    dtype: mx.Dtype | None = None,
    seed: int = 0,
) -> "DataFrame":
    """Seconds of one layer's experts at decode, computed in four ways.

    The ways are: K calls for each projection; one gather for each; gate and up in one array; and,
    as the floor, ``dense``, an MLP of hidden size K*F, with the same arithmetic and bytes.
    """
    dtype, variants = dtype or default_dtype(), {}
    for shape in shapes:
        D, F, K = SHAPES[shape].values()
        ways = _expert_calls(D, F, K, E or 4 * K, layers, dtype, seed)
        nbytes = K * 3 * D * F * 9 // 16
        for name, (calls, layer_s) in ways.items():
            told = {"variant": name, "shape": shape, "calls": calls, "nbytes": nbytes}
            variants[shape, name] = lambda _, s=layer_s, told=told: {"layer_s": s()} | told
    settings = {"E": E or "4 K", "layers": layers, "dtype": _name(dtype)}
    return records.interleave("experts", variants, rounds, settings, warmup=3, progress=False)


def _expert_calls(D, F, K, E, layers, dtype, seed):
    """``{way: (calls of a layer, function that gives seconds of a layer)}``."""
    mx.random.seed(seed)
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
        x = x0
        begin = time.perf_counter()
        for i, c in zip(indices, chosen):
            x = x + layer(x, i, c)
        mx.eval(x)
        return (time.perf_counter() - begin) / layers

    ways = {K_CALLS: (3 * K, separate), ONE_GATHER: (3, stacked), FUSED: (2, fused)}
    ways["dense"] = 3, dense
    return {name: (calls, partial(run, layer)) for name, (calls, layer) in ways.items()}


# Operations counted


def operations(*arrays: mx.array) -> dict[str, int]:
    """How many operations of each kind the evaluation of ``arrays`` runs, ``{name: count}``.

    Operations that only change a view are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        dot = Path(folder) / "graph.dot"
        mx.export_to_dot(str(dot), *arrays)
        labels = re.findall(r'\[label ="([^"]*)", shape=rectangle\]', dot.read_text())
    return dict(Counter(name for name in labels if not VIEWS.fullmatch(name)))


def count(path: str | Path) -> "DataFrame":
    """Count the operations of each layer in one decoded token, with MLX's kernels."""
    running, path = records.Running("count", {}), folder(path)
    models = dense_and_moe(D=256, F=64, E=16, layers=1, vocab=64) | {path.name: resident(path)}
    rows = [
        {"variant": name, "layer": i, "operations": sum(kinds.values())} | kinds
        for name, model in models.items()
        for i, kinds in enumerate(operations_of_layers(model))
    ]
    return running.table(rows)


def resident(path: str | Path, **config: Any) -> nn.Module:
    """Load a model with every expert in memory and MLX's kernels, which do not evaluate early."""
    return load(path, StreamConfig(mode="resident", kernels="mlx", **config))[0]


def operations_of_layers(model: nn.Module) -> Iterator[dict[str, int]]:
    """The ``operations`` of each layer in one decoded token."""
    inner = next(
        m for _, m in model.named_modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens")
    )
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=cache), [c.state for c in cache])
    D = inner.norm.weight.shape[0]
    for layer, c in zip(inner.layers, cache):
        x = mx.zeros((1, 1, D), inner.norm.weight.dtype)
        mx.eval(x)
        yield operations(layer(x, None, c))


def dense_and_moe(
    D: int = 2048, F: int = 512, K: int = 8, E: int = 32, layers: int = 8, vocab: int = 8192
) -> dict[str, nn.Module]:
    """Two random 4-bit models, Qwen3 with an MLP of size K*F and Qwen3-MoE with K experts of F.

    For each token both compute as much and touch as many bytes.
    """
    mx.random.seed(0)
    size = {"hidden_size": D, "intermediate_size": K * F, "num_hidden_layers": layers}
    heads = {"num_attention_heads": max(1, D // 128), "num_key_value_heads": max(1, D // 512)}
    rest = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e6}
    common = size | heads | rest | {"head_dim": 128, "vocab_size": vocab}
    experts = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": F}
    every_layer = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    dense = {"model_type": "qwen3", "tie_word_embeddings": True, **common}
    moe = dense | {"model_type": "qwen3_moe", **experts, **every_layer}
    models = {
        "dense": qwen3.Model(qwen3.ModelArgs(**dense)),
        "moe": qwen3_moe.Model(qwen3_moe.ModelArgs(**moe)),
    }
    for model in models.values():
        model.set_dtype(default_dtype())
        nn.quantize(model, GROUP, BITS)
        for layer in model.layers:  # one at a time: unquantized, a layer takes 8 times the memory
            mx.eval(layer.parameters())
        mx.eval(model.parameters())
        model.eval()
    return models


# Loops


@contextmanager
def hooked_experts(model: nn.Module, hook: Callable, only: slice = slice(None)) -> Iterator[None]:
    """Inside the block, ``hook(call, x, indices)`` replaces calls of the chosen layers' experts."""
    with ExitStack() as stack:
        for _, experts in expert_modules(model)[only]:
            stack.enter_context(hooked(experts, hook))
        yield


def before(listen: Callable[[mx.array, mx.array], Any]) -> Callable:
    """Make a hook that calls ``listen(x, indices)`` before a layer's experts."""

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
    listen: Callable[[mx.array, mx.array], Any] | None = None,
) -> dict[str, Any]:
    """Decode greedily and time it, with nothing in flight when the clock starts and stops.

    With ``ahead`` the next token is scheduled before this one is read. ``lock`` is taken around
    every evaluation. ``listen(x, indices)`` is called before each layer's experts.
    """
    lock = lock or nullcontext()
    cache = make_prompt_cache(model)
    with (
        mx.stream(stream) if stream is not None else nullcontext(),
        hooked_experts(model, before(listen)) if listen else nullcontext(),
    ):

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
        return {"decode_tokens": tokens, "decode_s": time.perf_counter() - begin}


LOOPS = {  # the arguments of ``loop``
    AHEAD: {},
    NOT_AHEAD: {"ahead": False},
    "ahead, a lock around evaluation": {"lock": threading.RLock()},
    "ahead, no stream context": {"stream": None},
    ROUTING_READ: {"listen": lambda x, i: np.array(i)},
    "every layer's routing scheduled": {"listen": lambda x, i: mx.async_eval(i)},
    "every layer's input evaluated": {"listen": lambda x, i: mx.eval(x)},
}


def loops(path: str | Path, tokens: int = 48, rounds: int = 20) -> "DataFrame":
    """Decode a resident model in each variant of ``LOOPS``: what it waits for, locks, or names."""
    path, model = folder(path), resident(path)
    variants = {name: lambda _, how=how: loop(model, tokens, **how) for name, how in LOOPS.items()}
    settings = {"model": path.name, "tokens": tokens}
    return records.interleave("loops", variants, rounds, settings, warmup=2, progress=False)


def buffers(
    tokens: int = 48,
    rounds: int = 10,
    settings: Iterable[str] = tuple(SETTINGS),
    sizes: Mapping[str, int] = {},
) -> "DataFrame":
    """Decode ``dense_and_moe`` under settings of command buffers, the MoE also ``ROUTING_READ``.

    Settings matter only on a GPU; each has a process of its own.
    """
    running = records.Running("buffers", {"tokens": tokens, "runs": rounds, **sizes})
    rows = []
    for setting in settings:
        with unittest.mock.patch.dict(os.environ, SETTINGS[setting]):
            made, _ = limit.call(_loops_of_both, tokens, rounds, dict(sizes), what=setting)
        rows += [
            {"variant": f"{row['model']}, {setting}", "setting": setting} | row for row in made
        ]
    return running.table(rows)


def _loops_of_both(tokens, rounds, sizes):
    models = dense_and_moe(**sizes)
    runs = [("dense", AHEAD), ("moe", AHEAD), ("moe", ROUTING_READ)]
    variants = {
        (name, how): lambda _, name=name, how=how: (
            loop(models[name], tokens, **LOOPS[how]) | {"model": name, "loop": how}
        )
        for name, how in runs
    }
    made = records.interleave("loops", variants, rounds, warmup=2, progress=False)
    return records.as_json(made.drop(columns="variant"))["rows"]


def stray_scalar(path: str | Path, tokens: int = 32, rounds: int = 20) -> "DataFrame":
    """Decode in bfloat16 with and without a float32 scalar in the model.

    The scalar multiplies the first MoE layer's output: it and all that follows become float32.
    """
    path, scalar = folder(path), mx.array(1.0, mx.float32)
    model = resident(path, dtype="bfloat16")
    if (found := len(expert_modules(model))) < 2:
        raise ValueError(f"expected at least 2 MoE layers, got {found}")

    def run(first, _):
        seen = set()
        with (
            hooked_experts(model, first, slice(1)),
            hooked_experts(model, before(lambda x, i: seen.add(x.dtype)), slice(found - 1, found)),
        ):
            made = loop(model, tokens)
        return made | {"last_dtype": " ".join(_name(dtype) for dtype in seen)}

    variants = {
        PLAIN: partial(run, lambda call, x, i: call(x, i)),
        STRAY: partial(run, lambda call, x, i: call(x, i) * scalar),
    }
    settings = {"model": path.name, "tokens": tokens}
    return records.interleave("scalar", variants, rounds, settings, progress=False)


def _name(dtype):
    return str(dtype).removeprefix("mlx.core.")


# A model to explore


def dial(D: int, F: int, other_operations: int = 40) -> Callable[[int, int, int], charts.go.Figure]:
    """The function behind the sliders of notebook 01: from top-k, layers and GB/s to a figure."""

    def look(top_k: int, layers: int, bandwidth: int):
        move_ms = layers * top_k * 3 * D * F * 9 / 16 / bandwidth / 1e6
        calls = {K_CALLS: 3 * top_k, ONE_GATHER: 3, FUSED: 2}
        rows = [
            {
                "variant": name,
                "us": us,
                "ms": max(move_ms, layers * (n + other_operations) * us / 1e3),
            }
            for name, n in calls.items()
            for us in range(0, 61, 5)
        ]
        made = records.table({"record": "", "machine": "", "rows": rows})
        claimed = records.PUBLISHED["PR 90"]["one dispatch (us)"]
        at = made[made.us == claimed].set_index("variant").ms
        return charts.lines(
            made,
            "us",
            "ms",
            title="A model, not a measurement: the cost of a dispatch that sets the pace",
            axes=("cost of one dispatch (us)", "ms a token"),
            finding=f"At {claimed:.0f} us a dispatch, one gather for each projection would give "
            f"{at[K_CALLS] / at[ONE_GATHER]:.2f} times the speed of K calls.",
            note=f"D={D}, F={F}, {layers} layers, top-{top_k}, {other_operations} other "
            f"operations a layer; experts at {bandwidth} GB/s, all in memory",
            ceilings={"memory bandwidth": move_ms},
            marks=False,
        )

    return look


ALONE = {"operation": one_operation, "experts": expert_calls, "buffers": buffers}
OF_A_MODEL = {"count": count, "loops": loops, "scalar": stray_scalar}


def main(work: str, out: str, *model: str) -> None:
    """Write a record of one kind of work; count, loops and scalar take a model's folder."""
    works = OF_A_MODEL if model else ALONE
    if work not in works or len(model) > 1:
        raise ValueError(
            f"dispatch: expected {', '.join(ALONE)}, or {', '.join(OF_A_MODEL)} and a model; got "
            f"{' '.join((work, *model))!r}"
        )
    records.print_and_save("", works[work](*model), out)

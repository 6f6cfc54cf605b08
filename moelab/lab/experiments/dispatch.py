"""What a decoded token spends apart from arithmetic: operations sent, results read by the host, types gone astray.

Every function measures on whatever device MLX runs on and returns ``{"config": ..., "timings": {name: Timing}}``; notebook 01 and the
recorded CUDA run call the same ones.
"""

import re
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ...checkpoint import expert_modules
from ..timing import interleave

# D hidden, F expert hidden, K experts per token.
SHAPES = {
    "tiny-moe": dict(D=256, F=128, K=8),
    "qwen3.5-35b-a3b": dict(D=2048, F=512, K=8),
    "qwen3.5-122b-a10b": dict(D=3072, F=1024, K=8),
    "qwen3.5-397b-a17b": dict(D=4096, F=1024, K=10),
}
# Operations that only look at memory in another way; they send no kernel.
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


def default_dtype():
    """float32 on the CPU backend, where half precision is far slower; bfloat16 on a GPU."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


# One operation


def one_operation(count=400, rounds=20):
    """Seconds of one small operation (8 floats plus one): written down, in a chain, evaluated by itself.

    ``built`` is Python alone: the graph is made and dropped. ``chained`` divides the evaluation of a chain by its length.
    ``scheduled`` sends each one off without waiting; ``evaluated`` waits for each.
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
    return {
        "config": {"count": count},
        "timings": interleave(variants, rounds, n_warmup=3, config={"count": count}),
    }


# The experts of one layer


def _quantized(shape, bits=4):
    w = mx.quantize(mx.random.normal(shape) / np.sqrt(shape[-1]), 64, bits)
    mx.eval(w)
    return w


def expert_calls(D, F, K, E=None, layers=8, rounds=20, dtype=None, seed=0):
    """Seconds of one layer's experts at decode: K calls for each projection, one gather for each, gate and up in one.

    ``layers`` of them follow each other in one evaluation, each on the output of the one before. ``dense`` is an MLP of hidden size K*F:
    the same arithmetic and the same bytes with no routing, the floor.
    """
    mx.random.seed(seed)
    dtype = dtype or default_dtype()
    E = E or 4 * K
    gate, up, down = (
        tuple(p.astype(dtype) if i else p for i, p in enumerate(_quantized(s)))
        for s in ((E, F, D), (E, F, D), (E, D, F))
    )
    both = tuple(mx.concatenate([g, u], axis=1) for g, u in zip(gate, up))
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(E, K, replace=False) for _ in range(layers)]
    indices = [mx.array(c.astype(np.uint32)[None, None]) for c in chosen]
    single = {
        e: [tuple(mx.contiguous(a[int(e)]) for a in p) for p in (gate, up, down)]
        for e in {int(e) for c in chosen for e in c}
    }
    wide = [tuple(mx.contiguous(a[:K].reshape(K * F, -1)) for a in p) for p in (gate, up)]
    wide.append(tuple(p.astype(dtype) if i else p for i, p in enumerate(_quantized((D, K * F)))))
    x0 = mx.random.normal((1, 1, D)).astype(dtype)
    mx.eval(both, indices, single, wide, x0)

    def qmm(x, w):
        return mx.quantized_matmul(x, *w, transpose=True, group_size=64, bits=4)

    def gather(x, w, i):
        return mx.gather_qmm(x, *w, rhs_indices=i, transpose=True, group_size=64, bits=4)

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
        "K calls a projection": run(separate),
        "one gather a projection": run(stacked),
        "gate and up fused": run(fused),
        "dense": run(dense),
    }
    config = dict(
        D=D, F=F, K=K, E=E, layers=layers, dtype=str(dtype), nbytes=K * 3 * D * F * 9 // 16
    )
    return {"config": config, "timings": interleave(variants, rounds, n_warmup=3, config=config)}


def tokens_at_once(D, F, K, E=64, tokens=(1, 2, 4, 8, 32), rounds=10, dtype=None, seed=0):
    """Seconds of one layer's experts for T tokens: indices as they come, and sorted by expert as mlx-lm does from 64 indices on."""
    from mlx_lm.models.switch_layers import SwitchGLU, _gather_sort, _scatter_unsort

    mx.random.seed(seed)
    dtype = dtype or default_dtype()
    experts = SwitchGLU(D, F, E)
    nn.quantize(experts, 64, 4)
    experts.set_dtype(dtype)
    mx.eval(experts.parameters())
    rng = np.random.default_rng(seed)
    variants = {}
    for T in tokens:
        x = mx.random.normal((1, T, D)).astype(dtype)
        i = mx.array(
            np.stack([rng.choice(E, K, replace=False) for _ in range(T)])[None].astype(np.uint32)
        )
        mx.eval(x, i)

        def as_they_come(x=x, i=i):
            x = mx.expand_dims(x, (-2, -3))
            y = experts.down_proj(
                experts.activation(experts.up_proj(x, i), experts.gate_proj(x, i)), i
            )
            mx.eval(y)

        def by_expert(x=x, i=i):
            x, s, inverse = _gather_sort(mx.expand_dims(x, (-2, -3)), i)
            h = experts.activation(
                experts.up_proj(x, s, sorted_indices=True),
                experts.gate_proj(x, s, sorted_indices=True),
            )
            mx.eval(_scatter_unsort(experts.down_proj(h, s, sorted_indices=True), inverse, i.shape))

        variants[f"{T} as they come"], variants[f"{T} sorted"] = as_they_come, by_expert
    config = dict(D=D, F=F, K=K, E=E, dtype=str(dtype))
    return {"config": config, "timings": interleave(variants, rounds, n_warmup=2, config=config)}


# Operations counted


def operations(*arrays):
    """How many operations of each kind the evaluation of ``arrays`` runs: ``{name: count}``, views not among them."""
    with tempfile.TemporaryDirectory() as folder:
        dot = Path(folder) / "graph.dot"
        mx.export_to_dot(str(dot), *arrays)
        labels = re.findall(r'\[label ="([^"]*)", shape=rectangle\]', dot.read_text())
    names = {}
    for name in labels:
        if name not in VIEWS:
            names[name] = names.get(name, 0) + 1
    return names


def operations_of_a_layer(model):
    """The operations that each layer adds to one decoded token, ``[{name: count}]``."""
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


def dense_and_moe(D=2048, F=512, K=8, E=32, layers=8, vocab=8192, dtype=None, seed=0):
    """Two random 4-bit models of ``layers`` layers that differ in their MLPs alone: Qwen3 with a dense one of K*F, Qwen3-MoE.

    For each token both compute as much and touch as many bytes.
    """
    from mlx_lm.models import qwen3, qwen3_moe

    mx.random.seed(seed)
    common = dict(
        hidden_size=D, num_hidden_layers=layers, num_attention_heads=max(1, D // 128), num_key_value_heads=max(1, D // 512), head_dim=128,
        rms_norm_eps=1e-6, vocab_size=vocab, max_position_embeddings=4096, rope_theta=1e6, tie_word_embeddings=True, intermediate_size=K * F,
    )  # fmt: skip
    models = {
        "dense": qwen3.Model(qwen3.ModelArgs(model_type="qwen3", **common)),
        "moe": qwen3_moe.Model(
            qwen3_moe.ModelArgs(
                model_type="qwen3_moe",
                num_experts=E,
                num_experts_per_tok=K,
                moe_intermediate_size=F,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                norm_topk_prob=True,
                **common,
            )  # fmt: skip
        ),
    }
    for model in models.values():
        model.set_dtype(dtype or default_dtype())
        nn.quantize(model, 64, 4)
        for (
            layer
        ) in model.layers:  # one at a time: what is not quantized yet takes eight times the memory
            mx.eval(layer.parameters())
        mx.eval(model.parameters())
        model.eval()
    return models


# Loops


class _Hooked(nn.Module):
    # Stands before a layer's experts; called with what goes in, may change what comes out.
    def __init__(self, experts, before=None, after=None):
        super().__init__()
        self.experts, self._before, self._after = experts, before, after

    def __call__(self, x, indices):
        if self._before:
            self._before(x, indices)
        y = self.experts(x, indices)
        return self._after(y) if self._after else y


@contextmanager
def hooked(model, before=None, after=None, only=None):
    """For as long as it lasts, ``before(x, indices)`` runs ahead of every layer's experts and ``after(y)`` on what they give.

    Args:
        model (nn.Module): With experts in memory.
        only (int): One MoE layer's number. Default: all.
    """
    experts = expert_modules(model)
    chosen = experts if only is None else experts[only : only + 1]
    model.update_modules(tree_unflatten([(p, _Hooked(m, before, after)) for p, m in chosen]))
    try:
        yield model
    finally:
        model.update_modules(tree_unflatten(chosen))


def loop(model, tokens, ids=(1, 2, 3, 4), ahead=True, lock=None, stream=generation_stream):
    """Seconds a decoded token takes: greedy, the clock running with nothing in flight at either end.

    Args:
        ahead (bool): Schedule the next token before reading this one, as mlx-lm does; else read, then schedule.
        lock (Lock): Taken around every evaluation.
        stream (Stream): Of the generation; None: the default stream, no context.
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


def loops(model, tokens=64, rounds=7, routing=True, config=None):
    """Ways to run the same decode loop: what the host waits for, what it locks, which stream it names.

    Args:
        model (nn.Module): Resident.
        routing (bool): Also the ways that touch every layer's routing; False for a dense model.

    Returns:
        dict: Seconds a token, by the name of the way.
    """
    lock = threading.RLock()
    fresh = mx.new_stream(mx.default_device())
    variants = {
        "next token scheduled ahead": lambda: loop(model, tokens),
        "every token read, then the next": lambda: loop(model, tokens, ahead=False),
        "ahead, a lock around evaluation": lambda: loop(model, tokens, lock=lock),
        "ahead, no stream context": lambda: loop(model, tokens, stream=None),
        "ahead, a stream of its own": lambda: loop(model, tokens, stream=fresh),
    }

    def with_hook(before):
        def timed():
            with hooked(model, before):
                return loop(model, tokens)

        return timed

    if routing:
        variants |= {
            "every layer's routing read": with_hook(lambda x, i: np.array(i)),
            "every layer's routing scheduled": with_hook(lambda x, i: mx.async_eval(i)),
            "every layer's input evaluated": with_hook(lambda x, i: mx.eval(x)),
        }
    config = {"tokens": tokens, **(config or {})}
    return {"config": config, "timings": interleave(variants, rounds, n_warmup=2, config=config)}


def promotion(model, tokens=32, rounds=5, config=None):
    """Seconds a token of a half-precision model, as it is and after one float32 scalar in its first MoE layer.

    The scalar makes that layer's output float32, and everything after it.
    """
    stray, seen = mx.array(1.0, mx.float32), set()

    def timed():
        with (
            hooked(model, after=lambda y: y * stray, only=0),
            hooked(model, before=lambda x, i: seen.add(str(x.dtype)), only=-1 % count),
        ):
            return loop(model, tokens)

    count = len(expert_modules(model))
    if count < 2:
        raise ValueError(f"expected at least 2 MoE layers, got {count}")
    variants = {"as it is": lambda: loop(model, tokens), "one float32 scalar": timed}
    config = {"tokens": tokens, **(config or {})}
    timings = interleave(variants, rounds, n_warmup=1, config=config)
    return {"config": {**config, "dtype_in_the_last_layer": sorted(seen)}, "timings": timings}


# New experts into slots


def slot_writes(D, F, K=8, S=64, misses=(0, 1, 4, 8), rounds=10, seed=0, dtype=None):
    """Seconds to bring m new experts' weights (gate and up, from host memory) into a bank of S slots and run one gather over it.

    ``in place`` writes through the bank's own memory, as the engine does; ``set by slice`` lets MLX do it, one expert at a time;
    ``one scatter`` uploads the m experts together; ``upload`` brings them to the device but not into the bank.
    """
    mx.random.seed(seed)
    dtype = dtype or default_dtype()
    shape = (S, 2 * F, D // 8)
    host = np.random.default_rng(seed).integers(0, 2**32, (max(misses), *shape[1:]), np.uint32)
    scales = mx.full((S, 2 * F, D // 64), 1e-3, dtype)
    biases = mx.full((S, 2 * F, D // 64), -8e-3, dtype)
    x = mx.random.normal((1, 1, 1, 1, D)).astype(dtype)
    bank = [mx.random.randint(0, 2**31 - 1, shape).astype(mx.uint32)]
    aside = mx.zeros(
        shape, mx.uint32
    )  # a bank of its own: on CUDA a host write moves it to managed memory
    mx.eval(scales, biases, x, bank, aside)
    rows = np.asarray(aside)
    rng = np.random.default_rng(seed)

    def use(weights, slots):
        i = mx.array(slots.astype(np.uint32)[None, None])
        mx.eval(
            mx.gather_qmm(
                x, weights, scales, biases, rhs_indices=i, transpose=True, group_size=64, bits=4
            )
        )

    def pick():
        return rng.choice(S, K, replace=False)

    def in_place(m):
        slots = pick()
        for j in range(m):
            np.copyto(rows[slots[j]], host[j])
        use(aside, slots)

    def by_slice(m):
        slots = pick()
        for j in range(m):
            bank[0][int(slots[j])] = mx.array(host[j])
        use(bank[0], slots)

    def scatter(m):
        slots = pick()
        if m:
            bank[0][mx.array(slots[:m].astype(np.uint32))] = mx.array(host[:m])
        use(bank[0], slots)

    def upload(m):
        new = mx.array(host[:m]) if m else None
        if m:
            mx.eval(new)
        use(bank[0], pick())

    ways = {
        "in place": in_place,
        "set by slice": by_slice,
        "one scatter": scatter,
        "upload": upload,
    }
    variants = {
        f"{name}, {m} new": (lambda f=f, m=m: f(m)) for name, f in ways.items() for m in misses
    }
    config = dict(D=D, F=F, K=K, S=S, dtype=str(dtype), expert_nbytes=host[0].nbytes)
    return {"config": config, "timings": interleave(variants, rounds, n_warmup=3, config=config)}

"""Operations of a model, counted and listened to: what notebooks 01 and 02 measure with."""

import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models import qwen3, qwen3_moe
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, load
from ...experts import expert_modules
from ...hooks import hooked

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


def default_dtype() -> mx.Dtype:
    """float32 on the CPU backend, where half precision is far slower; bfloat16 on a GPU."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def operations(*arrays: mx.array) -> dict[str, int]:
    """How many operations of each kind the evaluation of ``arrays`` runs, ``{name: count}``.

    Operations that only change a view are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        dot = Path(folder) / "graph.dot"
        mx.export_to_dot(str(dot), *arrays)
        labels = re.findall(r'\[label ="([^"]*)", shape=rectangle\]', dot.read_text())
    return dict(Counter(name for name in labels if not VIEWS.fullmatch(name)))


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

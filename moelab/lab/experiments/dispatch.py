"""Count a model's operations and hook its experts, for notebook 10."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ...checkpoint import temporary_folder
from ...experts import expert_modules
from ...hooks import hooked

# Operations that only change how memory is seen; they run no kernel.
VIEWS = re.compile(
    "Broadcast|Reshape|Transpose|Slice|Squeeze|ExpandDims|Flatten|Unflatten|Split|AsStrided|View|"
    "Depends|StopGradient"
)


def default_dtype() -> mx.Dtype:
    """float32 on the CPU backend, where half precision is far slower; bfloat16 on a GPU."""
    return mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16


def operations(*arrays: mx.array) -> dict[str, int]:
    """Count the operations of each kind that evaluating ``arrays`` runs; views do not count."""
    with temporary_folder() as folder:
        dot = folder / "graph.dot"
        mx.export_to_dot(str(dot), *arrays)
        labels = re.findall(r'\[label ="([^"]*)", shape=rectangle\]', dot.read_text())
    return dict(Counter(name for name in labels if not VIEWS.fullmatch(name)))


def operations_of_layers(model: nn.Module) -> Iterator[dict[str, int]]:
    """Yield the ``operations`` of each layer in one decoded token."""
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


@contextmanager
def hooked_experts(model: nn.Module, hook: Callable) -> Iterator[None]:
    """Inside the block, ``hook(call, x, indices)`` replaces calls of each layer's experts."""
    with ExitStack() as stack:
        for _, experts in expert_modules(model):
            stack.enter_context(hooked(experts, hook))
        yield

"""What speculation needs of the target: embedding and head, layer outputs, its lock."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..hooks import hooked

PREFILL_STEP = 512  # prompt tokens in one pass, as in mlx-lm

_SHARED_LOCK = threading.RLock()


def lock(model: nn.Module) -> threading.RLock:
    """The lock to hold while a pass has hooks in layers: the model's own, or a shared one."""
    return getattr(model, "lock", _SHARED_LOCK)


def embedding_and_head(model: nn.Module) -> tuple[Callable, Callable]:
    """The target's embedding and its head, tied or not."""
    modules = dict(model.named_modules())
    tables = (nn.Embedding, nn.QuantizedEmbedding)
    embeddings = [
        m
        for k, m in modules.items()
        if isinstance(m, tables) and k.endswith(("embed_tokens", "wte", "embedding"))
    ]
    heads = [m for k, m in modules.items() if k.rpartition(".")[2] == "lm_head"]
    if len(embeddings) != 1 or len(heads) > 1:
        raise ValueError(
            f"draft: expected one embedding and at most one lm_head in {type(model).__module__}, "
            f"found {len(embeddings)} and {len(heads)}. Use a draft that is a language model."
        )
    return embeddings[0], heads[0] if heads else embeddings[0].as_linear


def compute_alike(draft: nn.Module, model: nn.Module, dtype: mx.Dtype) -> None:
    """Give a draft's network the target's dtype and, for good, the target's fast kernels."""
    draft.set_dtype(dtype)
    if kernels.used(model) and not kernels.used(draft):
        kernels.use(draft)
    # Evaluate all arrays here: a draft may run in another thread, which cannot evaluate them.
    mx.eval([list(module.values()) for module in draft.modules()])


class Capture:
    """A ``with`` block that keeps the outputs of some decoder layers, and can be entered again."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]):
        self._layer_ids = layer_ids
        self._hooks = [hooked(model.layers[i], partial(self._keep, i)) for i in set(layer_ids)]

    def __enter__(self) -> "Capture":
        self._outputs = {}
        try:  # an ``ExitStack`` takes 10 us more for every token
            for hook in self._hooks:
                hook.install()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def features(self) -> mx.array:
        """The layers' outputs in all calls since the block was entered: ``[B, T, n * D]``."""
        outputs = {i: mx.concatenate(parts, axis=1) for i, parts in self._outputs.items()}
        return mx.concatenate([outputs[i] for i in self._layer_ids], axis=-1)

    def _keep(self, i, call, *args, **kwargs):
        out = call(*args, **kwargs)
        self._outputs.setdefault(i, []).append(out[0] if isinstance(out, tuple) else out)
        return out

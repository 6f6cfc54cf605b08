"""DFlash: a small bidirectional transformer that drafts a whole block at once from what the target's layers put out.

After Chen et al., DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036); z-lab's published drafts are read as they are.
b block size, n tapped layers, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from ..checkpoint import (
    CheckpointError,
    check_config,
    describe,
    merge_headers,
    read_header,
    read_json,
    shorten,
)
from .generate import vocabulary


@dataclass
class DFlashArgs(BaseModelArgs):
    """A draft's ``config.json``: Qwen3's keys and DFlash's own."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    block_size: int
    num_target_layers: int
    dflash_config: dict
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict | None = None
    rope_parameters: dict | None = None
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    quantization: dict | None = None
    target_layer_ids: list[int] = field(init=False)
    mask_token_id: int = field(init=False)

    def __post_init__(self):
        if self.rope_parameters:  # transformers 5 nests them
            self.rope_theta = self.rope_theta or self.rope_parameters.get("rope_theta")
            self.rope_scaling = self.rope_scaling or self.rope_parameters
        self.rope_theta = self.rope_theta or 10000.0
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        self.mask_token_id = self.dflash_config["mask_token_id"]
        self.target_layer_ids = self.dflash_config.get("target_layer_ids") or spread(
            self.num_hidden_layers, self.num_target_layers
        )


def spread(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """The layers that a draft reads if its config names none: evenly from 1 to L - 3, one for each of its own."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and the block. Only the context's go to the cache."""

    def __init__(self, args: DFlashArgs, layer_type: str):
        super().__init__()
        D, bias = args.hidden_size, args.attention_bias
        self.heads, self.kv_heads, self.scale = (
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim**-0.5,
        )
        self.q_proj = nn.Linear(D, self.heads * args.head_dim, bias=bias)
        self.k_proj = nn.Linear(D, self.kv_heads * args.head_dim, bias=bias)
        self.v_proj = nn.Linear(D, self.kv_heads * args.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * args.head_dim, D, bias=bias)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)
        self.rope = initialize_rope(
            args.head_dim, args.rope_theta, False, args.rope_scaling, args.max_position_embeddings
        )
        self.window = args.sliding_window if layer_type == "sliding_attention" else None

    def _keys_values(self, x, offset):
        k, v = (p(x).reshape(*x.shape[:2], self.kv_heads, -1) for p in (self.k_proj, self.v_proj))
        return self.rope(self.k_norm(k).swapaxes(1, 2), offset=offset), v.swapaxes(1, 2)

    def extend(self, context, cache):
        """Put context [B, T, D] into the cache."""
        cache.update_and_fetch(*self._keys_values(context, cache.offset))

    def __call__(self, x, cache):
        B, b, _ = x.shape
        offset = cache.offset
        q = self.q_norm(self.q_proj(x).reshape(B, b, self.heads, -1)).swapaxes(1, 2)
        k, v = self._keys_values(x, offset)
        if offset:
            seen = (a[..., :offset, :] for a in (cache.keys, cache.values))
            k, v = (mx.concatenate(pair, axis=2) for pair in zip(seen, (k, v)))
        mask = None
        if self.window and offset + b > self.window:
            apart = mx.arange(offset, offset + b)[:, None] - mx.arange(offset + b)
            mask = mx.abs(apart) < self.window
        y = mx.fast.scaled_dot_product_attention(
            self.rope(q, offset=offset), k, v, scale=self.scale, mask=mask
        )
        return self.o_proj(y.swapaxes(1, 2).reshape(B, b, -1))


class Layer(nn.Module):
    def __init__(self, args: DFlashArgs, layer_type: str):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.self_attn = Attention(args, layer_type)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.mlp = MLP(args.hidden_size, args.intermediate_size)

    def __call__(self, x, cache):
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModel(nn.Module):
    """The network, its parameters named as in z-lab's files. It has neither embedding nor head: both are the target's."""

    def __init__(self, args: DFlashArgs):
        super().__init__()
        self.args = args
        self.fc = nn.Linear(
            len(args.target_layer_ids) * args.hidden_size, args.hidden_size, bias=False
        )
        self.hidden_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.layers = [Layer(args, t) for t in args.layer_types]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def make_cache(self) -> list:
        return [KVCache() for _ in self.layers]

    def extend(self, features: mx.array, cache: list) -> None:
        """Put the target's features [B, T, n * D] of the next T tokens into the cache."""
        context = self.hidden_norm(self.fc(features))
        for layer, c in zip(self.layers, cache):
            layer.self_attn.extend(context, c)

    def __call__(self, x: mx.array, cache: list) -> mx.array:
        """Hidden states [B, b, D] of an embedded block [B, b, D] that follows the cached context, for the target's head."""
        for layer, c in zip(self.layers, cache):
            x = layer(x, c)
        return self.norm(x)


class DFlashDraft:
    """A DFlash draft as `moelab.speculative_generate` wants it; see `generate.Draft`.

    Args:
        path_or_hf_repo (str or Path): Folder or Hub repository with the draft's ``config.json`` and weights, as z-lab publishes them.
        block_size (int, optional): b to draft with, the token that stands included. Default: what the draft was trained with.

    Raises:
        CheckpointError: The files are missing, or are not a DFlash draft.
        ValueError: The block size is below 2.
    """

    def __init__(self, path_or_hf_repo: str | Path, block_size: int | None = None):
        self.model = load_model(path_or_hf_repo)
        args = self.model.args
        self.block_size = args.block_size if block_size is None else block_size
        if self.block_size < 2:
            raise ValueError(
                f"block_size: expected 2 or more (the token that stands and a draft), got {self.block_size}. "
                f"This draft was trained with {args.block_size}."
            )
        self.layer_ids = tuple(args.target_layer_ids)
        self.cache = []

    def make_cache(self) -> list:
        return self.model.make_cache()

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        args, layers = self.model.args, model.layers
        embed, head = embedding_and_head(model)
        probe = embed(mx.array([[0]]))
        for what, expected, got in (
            ("a vocabulary of", vocabulary(model), args.vocab_size),
            ("a hidden size of", probe.shape[-1], args.hidden_size),
            ("to have been trained for a number of layers of", len(layers), args.num_target_layers),
        ):
            if expected != got:
                raise ValueError(
                    f"draft: expected {what} {expected}, as the target has, got {got}. A DFlash draft serves only the target it was trained for."
                )
        bad = [i for i in self.layer_ids if not 0 <= i < len(layers)]
        if bad or not 0 <= args.mask_token_id < args.vocab_size:
            raise ValueError(
                f"draft: expected target_layer_ids from 0 to {len(layers) - 1} and a mask_token_id below {args.vocab_size}, "
                f"got {list(self.layer_ids)} and {args.mask_token_id}. The draft's config.json does not fit this target."
            )
        self._embed, self._head = embed, head
        self.model.set_dtype(probe.dtype)
        self.cache = cache or self.make_cache()
        self._queue = []

    def extend(self, tokens: mx.array, features: mx.array | None) -> None:
        self._queue.append(features)

    def propose(self, last: int, n: int, choose: Callable[[mx.array], mx.array]) -> mx.array:
        if self._queue:
            self.model.extend(mx.concatenate(self._queue)[None], self.cache)
            self._queue = []
        if not n:
            mx.eval([c.state for c in self.cache])
            return mx.array([], mx.uint32)
        # The whole block, also where fewer are wanted: it was trained so, and a mask more costs next to nothing.
        block = mx.array([[last] + [self.model.args.mask_token_id] * (self.block_size - 1)])
        hidden = self.model(self._embed(block), self.cache)
        return choose(self._head(hidden[:, 1 : n + 1])[0])


def load(path_or_hf_repo: str | Path, block_size: int | None = None) -> DFlashDraft:
    """A draft from its folder or Hub repository; see `DFlashDraft`."""
    return DFlashDraft(path_or_hf_repo, block_size)


def load_model(path_or_hf_repo: str | Path) -> DFlashModel:
    """The network of a draft, with its weights.

    Raises:
        CheckpointError: As `DFlashDraft`.
    """
    try:
        path = Path(mlx_lm_utils._download(str(path_or_hf_repo)))
        config = read_json(path / "config.json")
    except CheckpointError:
        raise
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"{path_or_hf_repo}: expected the folder or Hub repository of a DFlash draft, found "
            f"none that can be read ({describe(e)})."
        ) from e
    missing = [k for k in ("block_size", "num_target_layers", "dflash_config") if k not in config]
    if missing:
        raise CheckpointError(
            f"{path / 'config.json'}: expected a DFlash draft's config, it has no {', '.join(missing)}. A draft that is a language model goes to ModelDraft."
        )
    files = sorted(path.glob("model*.safetensors"))
    tensors = merge_headers({file: read_header(file) for file in files})
    check_config(config, path / "config.json", len(tensors))
    try:
        args = DFlashArgs.from_dict(config)
        _check(args)
        model = DFlashModel(args)
        weights = {}
        for file in files:
            weights |= mx.load(str(file))
        weights = {k: w for k, w in weights.items() if "rotary_emb" not in k}
        if args.quantization:
            bits = {
                k: v for k, v in args.quantization.items() if k in ("group_size", "bits", "mode")
            }
            nn.quantize(model, **bits, class_predicate=lambda p, m: f"{p}.scales" in weights)
    except Exception as e:  # whatever wrong types and sizes lead to
        raise CheckpointError(
            f"{path / 'config.json'}: a DFlash draft cannot be built from it: {describe(e)}. "
            "Download it again."
        ) from e
    try:
        model.load_weights(list(weights.items()))
        _try(model)
    except Exception as e:
        raise CheckpointError(
            f"{path}: the weights are not those that its config.json describes ({describe(e)}). "
            "Download it again."
        ) from e
    model.eval()
    return model


def _check(args):
    """Refuse values that are not what a draft's config can have."""
    positive = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "num_target_layers", "vocab_size", "head_dim", "max_position_embeddings",
    )  # fmt: skip
    for name in positive:
        value = getattr(args, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"expected a {name} of 1 or more, got {shorten(repr(value), 60)}")
    b, most = args.block_size, args.max_position_embeddings
    if type(b) is not int or not 2 <= b <= most:
        raise ValueError(
            f"expected a block_size of 2 or more, got {shorten(repr(b), 60)} "
            f"(max_position_embeddings: {most})"
        )
    ids = args.target_layer_ids
    if not isinstance(ids, list) or not all(type(i) is int for i in [*ids, args.mask_token_id]):
        raise ValueError(
            "expected whole numbers as target_layer_ids and mask_token_id, got "
            f"{shorten(ids, 60)} and {shorten(args.mask_token_id, 60)}"
        )
    if not isinstance(args.layer_types, list) or len(args.layer_types) != args.num_hidden_layers:
        raise ValueError(
            f"expected layer_types for {args.num_hidden_layers} layers, got "
            f"{shorten(args.layer_types, 60)}"
        )


def _try(model):
    """Call the model, evaluating nothing: operations check types and shapes as they are called."""
    args, cache = model.args, model.make_cache()
    model.extend(mx.zeros((1, 1, len(args.target_layer_ids) * args.hidden_size)), cache)
    model(mx.zeros((1, args.block_size, args.hidden_size)), cache)


def embedding_and_head(model: nn.Module) -> tuple[Callable, Callable]:
    """The target's embedding and its head, tied or not.

    Raises:
        ValueError: The model has no embedding or head that can be told by its name.
    """
    modules = dict(model.named_modules())
    tables = (nn.Embedding, nn.QuantizedEmbedding)
    named = [
        m
        for k, m in modules.items()
        if isinstance(m, tables) and k.endswith(("embed_tokens", "wte", "embedding"))
    ]
    heads = [m for k, m in modules.items() if k.rpartition(".")[2] == "lm_head"]
    if len(named) != 1 or len(heads) > 1:
        raise ValueError(
            f"draft: expected one embedding and at most one lm_head in {type(model).__module__}, found {len(named)} and {len(heads)}. "
            "Use a draft that is a language model."
        )
    return named[0], heads[0] if heads else named[0].as_linear


class Capture:
    """Listen to decoder layers of one model, for as long as a `with` lasts; afterwards, also after an exception, it is as it was.

    It may be entered again and again: to make a class for a layer takes longer than to use it.

    Args:
        model (nn.Module): An mlx-lm model.
        layer_ids (Sequence[int]): Layers whose outputs to keep, 0 for the first.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]):
        self._ids, self._outputs, self._classes = layer_ids, {}, {}
        self._layers = {i: model.layers[i] for i in sorted(set(layer_ids))}

    def __enter__(self):
        self._before = {i: type(layer) for i, layer in self._layers.items()}
        for i, cls in self._before.items():
            if (i, cls) not in self._classes:
                own = {"__call__": _noting(cls.__call__, self._outputs, i)}
                self._classes[i, cls] = type(cls.__name__, (cls,), own)
            self._layers[i].__class__ = self._classes[i, cls]
        return self

    def __exit__(self, *error):
        for i, cls in self._before.items():
            self._layers[i].__class__ = cls

    @property
    def features(self) -> mx.array:
        """Outputs of the layers in the model's last call, side by side in their order: [B, T, n * D]."""
        return mx.concatenate([self._outputs[i] for i in self._ids], axis=-1)


def _noting(call, outputs, i):
    @wraps(call)
    def __call__(self, *args, **kwargs):
        out = call(self, *args, **kwargs)
        outputs[i] = out[0] if isinstance(out, tuple) else out
        return out

    return __call__

"""DFlash: a small bidirectional transformer that drafts a block at once from the target's layers.

After Chen et al., DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036).
z-lab's published drafts load as they are. b block size, n layers of the target that the draft
reads, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models import qwen3
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import KVCache

from .. import kernels
from ..checkpoint import (
    CheckpointError,
    check_config,
    check_fork,
    describe,
    merge_headers,
    read_header,
    read_json,
    shorten,
)
from .target import embedding_and_head, vocabulary

# While nothing is drafted, the features of so many tokens wait, and a draft reads so many at once.
# All of a text of 4,000 would take 70 MB, and 150 more while the draft reads them.
QUEUED_TOKENS = 128


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
        self.target_layer_ids = self.dflash_config.get("target_layer_ids") or default_layer_ids(
            self.num_hidden_layers, self.num_target_layers
        )


def default_layer_ids(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """The target's layers that a draft reads if its config names none: evenly from 1 to L - 3."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


class DFlashModel(nn.Module):
    """The network, with z-lab's names of parameters. Embedding and head are the target's."""

    def __init__(self, args: DFlashArgs):
        super().__init__()
        self.args = args
        self.fc = nn.Linear(
            len(args.target_layer_ids) * args.hidden_size, args.hidden_size, bias=False
        )
        self.hidden_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.layers = [qwen3.TransformerBlock(args) for _ in args.layer_types]
        for attention in (layer.self_attn for layer in self.layers if args.attention_bias):
            for name in ("q_proj", "k_proj", "v_proj"):
                attention[name] = nn.Linear(*attention[name].weight.shape[::-1])
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def make_cache(self) -> list:
        return [KVCache() for _ in self.layers]

    def extend(self, features: mx.array, cache: list) -> None:
        """Put the next T tokens into the cache; features ``[B, T, n * D]``.

        ``QUEUED_TOKENS`` or more are evaluated here, layer by layer; fewer are left to the caller.
        """
        context = self.hidden_norm(self.fc(features))
        for layer, c in zip(self.layers, cache):
            a, heads = layer.self_attn, (*context.shape[:2], self.args.num_key_value_heads, -1)
            k, v = (p(context).reshape(heads) for p in (a.k_proj, a.v_proj))
            k = a.rope(a.k_norm(k).swapaxes(1, 2), offset=c.offset)
            c.update_and_fetch(k, v.swapaxes(1, 2))
            if features.shape[1] >= QUEUED_TOKENS:
                mx.eval(c.state)  # MLX copies a cache that grows: only one layer's at a time

    def __call__(self, x: mx.array, cache: list) -> mx.array:
        """Hidden states ``[B, b, D]`` of a block x ``[B, b, D]`` that follows the cached context.

        The cache is as before afterwards.
        """
        b, window, masks = x.shape[1], self.args.sliding_window, {}
        end = cache[0].offset + b
        if window and end > window:
            apart = mx.arange(end - b, end)[:, None] - mx.arange(end)
            masks["sliding_attention"] = mx.abs(apart) < window
        for layer, kind, c in zip(self.layers, self.args.layer_types, cache):
            x = layer(x, masks.get(kind), c)
            c.trim(b)
        return self.norm(x)


class DFlashDraft:
    """A DFlash draft for ``moelab.speculative_generate``; see ``drafts.Draft``.

    It computes with its target's number type and, if the target does, with the fast kernels.
    ``block_size`` counts the last accepted token too. Default: what the draft was trained with.
    """

    def __init__(self, path_or_hf_repo: str | Path, block_size: int | None = None):
        self.model = load_model(path_or_hf_repo)
        args = self.model.args
        self.block_size = args.block_size if block_size is None else block_size
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise ValueError(
                "block_size: expected 2 or more (the last accepted token and a draft), "
                f"got {self.block_size}. This draft was trained with {args.block_size}."
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
                    f"draft: expected {what} {expected}, as the target has, got {got}. A DFlash "
                    "draft serves only the target it was trained for."
                )
        bad = [i for i in self.layer_ids if not 0 <= i < len(layers)]
        if bad or not 0 <= args.mask_token_id < args.vocab_size:
            raise ValueError(
                f"draft: expected target_layer_ids from 0 to {len(layers) - 1} and a mask_token_id "
                f"below {args.vocab_size}, got {list(self.layer_ids)} and {args.mask_token_id}. "
                "The draft's config.json does not fit this target."
            )
        self._embed, self._head = embed, head
        self.model.set_dtype(probe.dtype)
        if kernels.used(model) and not kernels.used(self.model):
            kernels.use(self.model)  # and keeps them for its next target
        # Another thread may draft, which could not schedule what this one leaves to compute.
        mx.eval([list(module.values()) for module in self.model.modules()])
        self.cache = cache or self.make_cache()
        self._queue, self._num_queued = [], 0

    def extend(self, tokens: mx.array, features: mx.array | None) -> None:
        self._queue.append(features)
        self._num_queued += len(features)
        if self._num_queued >= QUEUED_TOKENS:
            self._read_queue()
            mx.eval([c.state for c in self.cache])

    def propose(self, last: int, n: int, choose: Callable[[mx.array], mx.array]) -> mx.array:
        self._read_queue()
        if not n:
            mx.eval([c.state for c in self.cache])
            return mx.array([], mx.uint32)
        # Always the whole block: it was trained so, and further masks cost next to nothing.
        block = mx.array([[last] + [self.model.args.mask_token_id] * (self.block_size - 1)])
        hidden = self.model(self._embed(block), self.cache)
        if (self.cache[0].offset + self.block_size - 1) % KVCache.step < self.block_size:
            mx.eval(hidden)  # the block may have made the caches grow, and MLX keeps what they had
            mx.clear_cache()
        return choose(self._head(hidden[:, 1 : n + 1])[0])

    def _read_queue(self):
        if self._queue:
            features = mx.concatenate(self._queue)[None]
            for i in range(0, self._num_queued, QUEUED_TOKENS):
                if i:
                    mx.clear_cache()  # frees what the part before left
                self.model.extend(features[:, i : i + QUEUED_TOKENS], self.cache)
        self._queue, self._num_queued = [], 0


def load_model(path_or_hf_repo: str | Path) -> DFlashModel:
    """Load a draft's network and weights; a CheckpointError if the files are no DFlash draft's."""
    check_fork()
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
            f"{path / 'config.json'}: expected a DFlash draft's config, it has no "
            f"{', '.join(missing)}. A draft that is a language model goes to ModelDraft."
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
    """Refuse values that a draft's config cannot have."""
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
    """Call the model without evaluating: each operation checks types and shapes when called."""
    args, cache = model.args, model.make_cache()
    model.extend(mx.zeros((1, 1, len(args.target_layer_ids) * args.hidden_size)), cache)
    model(mx.zeros((1, args.block_size, args.hidden_size)), cache)

"""DFlash: a small bidirectional transformer drafts a block at once, from target layers' outputs.

Chen et al., DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036). z-lab's
published drafts load as they are. In shapes, b is the block size, n the number of layers read.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache

from ..checkpoint.checkpoint import check_config, check_fork, checked
from ..checkpoint.files import read_json, readable, shorten
from ..checkpoint.headers import merge_headers, read_header
from ..prompt import vocabulary
from .drafts import Choose, Draft
from .target import compute_alike, embedding_and_head

# The draft reads its queued features once this many tokens wait, at most this many at a time.
# Features of 4,000 tokens would take 70 MB, and 150 MB more while the draft reads them.
QUEUED_TOKENS = 128

SIZES = (
    "block_size", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_key_value_heads", "num_target_layers", "vocab_size",
)  # fmt: skip


@dataclass(kw_only=True)
class DFlashArgs(qwen3.ModelArgs):
    """A draft's ``config.json``: Qwen3's keys, some with a default, and DFlash's own."""

    model_type: str = "qwen3"
    tie_word_embeddings: bool = False
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    block_size: int
    num_target_layers: int
    dflash_config: dict
    rope_parameters: dict | None = None
    attention_bias: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None

    def __post_init__(self):
        nested = self.rope_parameters or {}  # transformers 5 nests these keys
        self.rope_theta = self.rope_theta or nested.get("rope_theta") or 10000.0
        self.rope_scaling = self.rope_scaling or self.rope_parameters
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        self.mask_token_id = self.dflash_config["mask_token_id"]
        self.target_layer_ids = self.dflash_config.get("target_layer_ids") or default_layer_ids(
            self.num_hidden_layers, self.num_target_layers
        )

        def check(name, good):  # MLX would silently take numbers that no draft has
            if not good:
                raise ValueError(f"a {name} of {shorten(repr(getattr(self, name)), 60)}")

        for name in SIZES:
            check(name, type(n := getattr(self, name)) is int and n > 0)
        check("block_size", 2 <= self.block_size <= self.max_position_embeddings)
        check("mask_token_id", type(self.mask_token_id) is int)
        check("target_layer_ids", all(type(i) is int for i in self.target_layer_ids))
        kinds = self.layer_types
        check("layer_types", isinstance(kinds, list) and len(kinds) == self.num_hidden_layers)


def default_layer_ids(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """The target layers that a draft reads by default: spread over 1 to L - 3; if one, L // 2."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


class DFlashModel(nn.Module):
    """The network, with z-lab's parameter names. It uses the target's embedding and head."""

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

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights that are parameters. mlx-lm calls this when it loads the draft."""
        return {k: w for k, w in weights.items() if "rotary_emb" not in k}

    def make_cache(self) -> list:
        return [KVCache() for _ in self.layers]

    def extend(self, features: mx.array, cache: list) -> None:
        """Put T tokens' features ``[B, T, n * D]`` into the cache, unevaluated."""
        context = self.hidden_norm(self.fc(features))
        for layer, c in zip(self.layers, cache):
            a, heads = layer.self_attn, (*context.shape[:2], self.args.num_key_value_heads, -1)
            k, v = (p(context).reshape(heads) for p in (a.k_proj, a.v_proj))
            k = a.rope(a.k_norm(k).swapaxes(1, 2), offset=c.offset)
            c.update_and_fetch(k, v.swapaxes(1, 2))
            if features.shape[1] >= QUEUED_TOKENS:
                mx.eval(c.state)  # MLX copies a growing cache: let it copy one layer at a time

    def __call__(self, x: mx.array, cache: list) -> mx.array:
        """Compute a block x ``[B, b, D]`` after the cached context; the cache stays the same."""
        b, window, masks = x.shape[1], self.args.sliding_window, {}
        end = cache[0].offset + b
        if window and end > window:
            apart = mx.arange(end - b, end)[:, None] - mx.arange(end)
            masks["sliding_attention"] = mx.abs(apart) < window
        for layer, kind, c in zip(self.layers, self.args.layer_types, cache):
            x = layer(x, masks.get(kind), c)
            c.trim(b)
        return self.norm(x)


class DFlashDraft(Draft):
    """A DFlash draft for ``moelab.speculative_generate`` (Chen et al., arXiv 2602.06036).

    It guesses a block of tokens at once, from the outputs of some of its target's layers. It takes
    its target's dtype. If a target has the fast kernels, the draft gets them too and keeps them.
    ``block_size`` is the length of a block in training; its first token is the last accepted one.
    For the methods see ``drafts.Draft``.

    Args:
        path_or_hf_repo (str or Path): The folder or Hub repository of a draft in z-lab's format.

    Raises:
        CheckpointError: If the folder has no such draft, or its files are damaged.
    """

    def __init__(self, path_or_hf_repo: str | Path):
        self.model = load_model(path_or_hf_repo)
        args = self.model.args
        self.block_size, self.layer_ids = args.block_size, tuple(args.target_layer_ids)

    def make_cache(self) -> list:
        return self.model.make_cache()

    def read_zeros(self) -> list:
        values = len(self.layer_ids) * self.model.args.hidden_size
        self.model.extend(mx.zeros((1, 2, values)), caches := self.make_cache())
        return caches

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        args, L = self.model.args, len(model.layers)
        self._embed, self._head = embedding_and_head(model)
        probe = self._embed(mx.array([[0]]))
        V, D, ids, mask = vocabulary(model), probe.shape[-1], self.layer_ids, args.mask_token_id
        for expected, got, fits in (
            (f"a vocabulary of {V}", args.vocab_size, args.vocab_size == V),
            (f"a hidden size of {D}", args.hidden_size, args.hidden_size == D),
            (f"num_target_layers of {L}", args.num_target_layers, args.num_target_layers == L),
            (f"target_layer_ids from 0 to {L - 1}", list(ids), all(0 <= i < L for i in ids)),
            (f"a mask_token_id from 0 to {V - 1}", mask, 0 <= mask < V),
        ):
            if not fits:
                raise ValueError(
                    f"draft: expected {expected}, as the target has, got {got}. A DFlash draft "
                    "serves only the target it was trained for."
                )
        compute_alike(self.model, model, probe.dtype)
        self.cache = cache or self.make_cache()
        self._queue, self._num_queued = [], 0

    def extend(self, tokens: mx.array, features: mx.array | None) -> None:
        self._queue.append(features)
        self._num_queued += len(features)
        if self._num_queued >= QUEUED_TOKENS:
            self._read_queue()
            mx.eval([c.state for c in self.cache])

    def propose(self, last: int, n: int, choose: Choose) -> mx.array:
        self._read_queue()
        if not n:
            mx.eval([c.state for c in self.cache])
            return mx.array([], mx.uint32)
        # Draft a whole block, as in the draft's training: more masks cost next to nothing.
        block = mx.array([[last] + [self.model.args.mask_token_id] * (self.block_size - 1)])
        hidden = self.model(self._embed(block), self.cache)
        if (self.cache[0].offset + self.block_size - 1) % KVCache.step < self.block_size:
            mx.eval(hidden)  # the caches grew for the block, and MLX keeps their old memory
            mx.clear_cache()
        return choose(self._head(hidden[:, 1 : n + 1])[0])

    def _read_queue(self):
        if self._queue:
            features = mx.concatenate(self._queue)[None]
            for i in range(0, self._num_queued, QUEUED_TOKENS):
                if i:
                    mx.clear_cache()  # frees the previous part's memory
                self.model.extend(features[:, i : i + QUEUED_TOKENS], self.cache)
        self._queue, self._num_queued = [], 0


def load_model(path_or_hf_repo: str | Path) -> DFlashModel:
    """Load a draft's network and weights; CheckpointError if the files are no DFlash draft."""
    check_fork()
    expected = f"{path_or_hf_repo}: expected a DFlash draft and the weights of its config.json, got"
    remedy = "Download it again, or give another draft. A language model needs ModelDraft."
    with readable(expected, remedy):  # wrong types and sizes raise many types of errors
        path = Path(mlx_lm_utils._download(str(path_or_hf_repo)))
        files = sorted(path.glob("model*.safetensors"))
        tensors = merge_headers({file: read_header(file) for file in files})
        check_config(read_json(path / "config.json"), path / "config.json", len(tensors))
        own = {"get_model_classes": partial(checked, DFlashModel, DFlashArgs)}
        model, _ = mlx_lm_utils.load_model(path, lazy=True, **own)
        # Call the draft on zeros, without evaluation: MLX raises if types or shapes do not fit.
        cache, D = model.make_cache(), model.args.hidden_size
        model.extend(mx.zeros((1, 1, len(model.args.target_layer_ids) * D)), cache)
        model(mx.zeros((1, model.args.block_size, D)), cache)
    return model

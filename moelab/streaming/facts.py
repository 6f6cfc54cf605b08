"""``ModelFacts``: what a model is made of, found once before a weight is read."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from .. import kernels
from ..checkpoint import Checkpoint, ExpertTensor, leaves, try_out
from ..experts import expert_modules, expert_parameters, locate_experts, num_experts
from ..system import on_metal
from .build import build_model
from .config import StreamConfig
from .disk_embedding import DiskEmbedding
from .residency.bank import slot_nbytes

# A decoding call has at most this many tokens: one of each text in a batch, or one and its drafts.
# A longer call is a prompt: it borrows memory of slots, and evaluates recurrent states on the way.
FEW_TOKENS = 64
# A prompt is computed in chunks of at most this many tokens, mlx-lm's own number.
PROMPT_TOKENS = 2048
# Beside its experts' arrays a layer keeps for each token ``BLOCK_VALUES`` arrays of the hidden size
# with MLX's kernels, ``STREAM_VALUES`` arrays with the fast kernels. The fast kernels also keep
# ``BLOCK_COPIES`` times the results of those matrices that belong to no routed expert.
BLOCK_VALUES, STREAM_VALUES, BLOCK_COPIES = 16, 8, 3
LINEARS = (nn.Linear, nn.QuantizedLinear)


@dataclass(frozen=True)
class ModelFacts:
    """What a model is made of, and the bytes it takes; a record keeps the first five fields."""

    experts: dict[str, int]  # E of each MoE layer, by the path of the module of its experts
    top_k: int  # K; 0 without experts
    checkpoint_nbytes: int  # the tensors on disk
    expert_nbytes: int  # one expert of the first layer on disk
    layers_nbytes: tuple[int, ...]  # one slot of each layer
    path: Path = Path()  # of the checkpoint
    # The experts' parameters, by path in the model. ``located`` has the places of parameters that
    # are read into slots. ``resident`` parameters stay in memory for all E. ``scattered``
    # parameters cannot be read, since an expert's bytes are not contiguous.
    located: dict[str, ExpertTensor] = field(default_factory=dict, repr=False)
    resident: tuple[str, ...] = field(default=(), repr=False)
    scattered: tuple[str, ...] = field(default=(), repr=False)
    slots: int = 0  # S, or the experts that a layer keeps in a mode without slots; 0 before a plan
    num_blocks: int = 0  # all layers, those without experts as well
    dtype: mx.Dtype = mx.float32  # of the activations
    table_nbytes: int = 0  # embeddings on disk (0 if tied to the head): a token needs one row
    backbone_nbytes: int = 0  # all but the experts; a table on disk counts with its rows in memory
    resident_nbytes: int = 0  # the experts' parameters that stay in memory for all E, beside slots
    caches_nbytes: int = 0  # key-value caches and states of ``StreamConfig.context`` tokens
    states_nbytes: int = 0  # the recurrent states of a text
    token_nbytes: int = 0  # to compute one token of a prompt
    token_logits_nbytes: int = 0  # logits of one token, if all logits of a prompt are computed
    logits_nbytes: int = 0  # logits of ``FEW_TOKENS`` tokens, if the logits of a prompt wait

    @classmethod
    def of(
        cls, path: str | Path, config: StreamConfig, trust_remote_code: bool = False
    ) -> "ModelFacts":
        """The facts of a model folder."""
        checkpoint, config = Checkpoint(path), config.resolved()
        model, _, top_k = build_model(checkpoint, config, trust_remote_code=trust_remote_code)
        return facts_of(model, checkpoint, config, top_k)

    @property
    def num_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.experts)

    @property
    def num_experts(self) -> int:
        """E, the largest of any layer; 0 without experts."""
        return max(self.experts.values(), default=0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """L, K and E, as in a trace of the model."""
        return self.num_layers, self.top_k, self.num_experts

    @property
    def slot_nbytes(self) -> int:
        """The bytes of one slot in every layer."""
        return sum(self.layers_nbytes)

    @property
    def slots_nbytes(self) -> int:
        """The bytes of all slots, or of the experts that a mode without slots keeps."""
        layers = zip(self.layers_nbytes, self.experts.values())
        return sum(nbytes * min(self.slots, E) for nbytes, E in layers)

    @property
    def kept_nbytes(self) -> int:
        """The bytes of everything that stays in memory, except the slots."""
        return self.backbone_nbytes + self.resident_nbytes

    @property
    def total_nbytes(self) -> int:
        """The bytes of a loaded model, without a prompt's activations and caches."""
        return self.kept_nbytes + self.slots_nbytes

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the checkpoint, less the experts and less embeddings that are not the head."""
        experts = self.num_layers * self.num_experts * self.expert_nbytes
        return self.checkpoint_nbytes - experts - self.table_nbytes

    @property
    def active_nbytes(self) -> int:
        """Bytes of the checkpoint that a decoded token needs."""
        return self.dense_nbytes + self.num_layers * self.top_k * self.expert_nbytes

    def few_nbytes(self, tokens: int) -> int:
        """The bytes of arrays and logits for ``tokens`` tokens, but at most ``FEW_TOKENS``."""
        return min(tokens, FEW_TOKENS) * self.token_nbytes + self.logits_nbytes

    def arrays_nbytes(self, tokens: int) -> int:
        """The bytes of a call's arrays. Layers' arrays are freed before logits are computed."""
        return max(tokens * self.token_nbytes, self.few_nbytes(tokens))


def facts_of(
    model: nn.Module, checkpoint: Checkpoint, config: StreamConfig, top_k: int
) -> ModelFacts:
    """Find facts from shapes, types and two calls with one token each; evaluate nothing."""
    caches = []

    def call(tokens, cache):  # with a damaged config.json, making the caches may fail too
        caches.extend([] if caches else make_prompt_cache(model))
        return model(tokens, cache=caches)

    logits = try_out(checkpoint, call)
    states = [c.nbytes for c in leaves(caches) if isinstance(c, ArraysCache)]
    modules = dict(expert_modules(model))
    parameters = {path: expert_parameters(m) for path, m in modules.items()}
    every = {f"{path}.{name}": p for path, named in parameters.items() for name, p in named.items()}
    streams, located = config.mode != "resident", locate_experts(model, checkpoint, every)
    # Additive biases and tensor-wide scales stay in memory: they are small beside matrices.
    resident = [name for name, p in every.items() if not streams or p.ndim <= 2]
    in_slots = every.keys() - resident
    in_files = {name: t for name, t in located.items() if name in in_slots}
    layers = [slot_nbytes(path, named, in_files) for path, named in parameters.items()]
    counts = [num_experts(module) for module in modules.values()]
    kept_of = {"resident": max(counts, default=0), "serial": 1, "buffers": top_k}
    first = next(iter(modules), None)
    dtype = _activation_dtype(model)
    token = _token_values(model, modules, checkpoint, config, top_k) * dtype.size
    each = few = 0  # bytes of logits: of one token, of FEW_TOKENS; fast kernels also copy them
    if config.kernels == "fast" and logits is not None:
        each = 2 * logits.shape[-1] * dtype.size
        each, few = (0, FEW_TOKENS * each) if config.lazy_logits else (each, 0)
    elif logits is not None and not on_metal():
        # MLX's kernels keep a recurrent state for every token, except on Metal.
        token += max(states, default=0)
    tensors = checkpoint.tensors
    is_tied = not any("head" in name for name in tensors)
    return ModelFacts(
        experts=dict(zip(modules, counts)),
        top_k=top_k,
        checkpoint_nbytes=checkpoint.nbytes,
        expert_nbytes=sum(t.nbytes for name, t in located.items() if name.startswith(f"{first}.")),
        layers_nbytes=tuple(layers),
        path=checkpoint.path,
        located=in_files,
        resident=tuple(resident),
        scattered=tuple(name for name in every if name in in_slots and name not in located),
        slots=kept_of.get(config.mode, 0 if config.asks_for_slots else config.slots),
        num_blocks=len({n[0] for name in tensors if (n := re.findall(r"layers\.(\d+)\.", name))}),
        dtype=dtype,
        table_nbytes=0 if is_tied else sum(t.nbytes for n, t in tensors.items() if "embed" in n),
        backbone_nbytes=sum(p.nbytes for _, p in tree_flatten(model.parameters()))
        - sum(p.nbytes for p in every.values())
        + sum(m.hot_nbytes for m in model.modules() if isinstance(m, DiskEmbedding)),
        resident_nbytes=sum(every[name].nbytes for name in resident) if streams else 0,
        caches_nbytes=0 if logits is None else grown_nbytes(caches, config.context),
        states_nbytes=sum(states),
        token_nbytes=max(token, each),
        token_logits_nbytes=each,
        logits_nbytes=few,
    )


def _activation_dtype(model):
    """The type of the activations, which is that of the embedding."""
    types = {name: p.dtype for name, p in tree_flatten(model.parameters())}
    floating = {name: t for name, t in types.items() if mx.issubdtype(t, mx.floating)}
    return floating[next((name for name in floating if "embed" in name), next(iter(floating)))]


def grown_nbytes(caches: list, context: int) -> int:
    """Grow ``caches`` from two tokens to ``context``; return the most bytes that they take."""
    kept = [_grown(c, context) for c in leaves(caches)]
    # A key-value cache is copied when it grows, so one cache at a time takes twice its bytes.
    return sum(kept) + max(kept, default=0)


def _grown(cache, context):
    """Return a cache's bytes once it has grown from two tokens to ``context``; evaluate nothing."""
    if isinstance(cache, ArraysCache):
        return cache.nbytes
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return cache.nbytes * -(-context // 2)  # a cache class of the family's own
    # The length of a chunk matters only in a cache of limited size, and a full cache stays full.
    limit, chunk = getattr(cache, "max_size", None), context
    if limit is not None:
        chunk = PROMPT_TOKENS
        context = min(context, limit + chunk + (context - limit) % chunk)
    for first in range(2, context, chunk):
        shapes = [(*a.shape[:2], min(chunk, context - first), a.shape[-1]) for a in (keys, values)]
        cache.update_and_fetch(*(mx.zeros(shape, keys.dtype) for shape in shapes))
    return cache.nbytes


def _token_values(model, modules, checkpoint, config, top_k):
    """Estimate a token's values in the largest layer: 10 to 30% more than was measured."""
    fast, most = config.kernels == "fast", 0
    text = checkpoint.config.get("text_config") or checkpoint.config
    given = (text.get(key) for key in ("num_attention_heads", "hidden_size"))
    heads, width = (n if isinstance(n, int) else 0 for n in given)
    for module in modules.values():
        linears = [module[n] for n in {name.split(".")[0] for name in expert_parameters(module)}]
        inputs, outputs = zip(*((m.input_dims, m.output_dims) for m in linears))
        D = module["fc2" if "fc2" in module else "down_proj"].output_dims
        width = max(width, D)  # some families' experts have a smaller width than their model
        if fast and all(kernels.fits(m) and "bias" not in m for m in linears):
            # One call of the kernels keeps its result and those of gate and up; the input of the
            # last matrix takes as much memory as the results of gate and up.
            pairs = D + 2 * (sum(outputs) - D)
        else:
            pairs = sum(inputs) + sum(outputs) + D
        most = max(most, top_k * pairs)
    if fast:
        return max(most, BLOCK_COPIES * _outputs(model)) + STREAM_VALUES * width
    return most + BLOCK_VALUES * width + heads * config.context


def _outputs(model):
    """Return the number of outputs of the largest block's matrices, without its experts."""
    outputs = Counter()
    for path, module in model.named_modules():
        layer = next((i for i, part in enumerate(path.split(".")) if part.isdigit()), None)
        if layer is not None and isinstance(module, LINEARS):
            outputs[tuple(path.split(".")[: layer + 2])] += len(module.weight)
    return max(outputs.values(), default=0)

"""Blocks of mlx-lm that compute without MLX's graph: gated delta, attention, experts.

A block makes a dozen calls of native code. (MLX takes 16 to 60 us to evaluate one module.) The
kernels take only mlx-lm's caches, and float32 inputs without padding. For other caches and inputs,
in training, with hooks, or after a library replaced a function, a block calls mlx-lm's modules.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.cache import ArraysCache

from ..hooks import replaced
from . import attention, code, experts, gated_delta, modules, rowwise
from .code import to_mlx
from .modules import is_itself, products
from .quantized import Rows


class Recurred(NamedTuple):
    """What a gated-delta block did in a pass."""

    y: np.ndarray  # ``[n, D]``, the output
    before: np.ndarray  # ``[B, width - 1, C]``, the convolution's inputs before the tokens
    qkv: np.ndarray  # ``[n, C]``, the tokens' inputs to the convolution
    after: np.ndarray  # ``[B, width - 1, C]``, the convolution's inputs before the next token
    state: np.ndarray  # ``[B, Hv, Dv, Dk]``, the recurrent state after the tokens
    inputs: tuple  # arguments of ``gated_delta.recur``

    @property
    def conv(self) -> np.ndarray:
        """``[B, width - 1 + T, C]``, what went into the convolution."""
        B, _, C = self.before.shape
        return np.concatenate([self.before, self.qkv.reshape(B, -1, C)], axis=1)


class Block(modules.Watched):
    """A mixin for mlx-lm's classes of blocks; ``hooks.replaced`` checks its ``originals``.

    A subclass has ``own_matrices`` and ``forward_with``, which computes a call with them, or has a
    ``forward`` of its own (``layers.Layer``).
    """

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = None
        if modules.takes(x) and x.ndim == 3:
            y = self.forward(Rows.of(x), x.shape[0], mask, cache)
        if y is None:
            given = {"mask": mask, "cache": cache} if self.has_cache else {}
            call = super().__call__ if self.recorder is None else self.recorder.call
            return call(x, **given)
        return to_mlx(y.reshape(x.shape))

    known_call = __call__
    has_cache = True
    recorder = None  # a ``Recorder`` of ``speculation.recurrence`` while it records

    def forward(self, x: Rows, B: int, mask: Any = None, cache: Any = None) -> np.ndarray | None:
        """Compute the block for B texts' tokens x ``[n, D]``; None if the kernels do not fit."""
        found = self.own_matrices() if self.knows(mask, cache) else None
        return None if found is None else self.forward_with(x, B, found, mask, cache)

    def knows(self, mask: Any, cache: Any) -> bool:
        """Whether the kernels fit the mask and the cache of a call."""
        return True

    @property
    def is_known(self) -> bool:
        """Whether the block is neither trained nor sharded, and its originals are unchanged."""
        divided = getattr(self, "sharding_group", None) is not None
        return not (self.training or divided or replaced(self.originals))


def forward(module: nn.Module, x: Rows, B: int, *given: Any) -> np.ndarray:
    """Call a module with ``given`` (mask, cache), by kernels or else by MLX; return ``[n, D]``."""
    known = is_itself(module, Block) or is_itself(module, modules.FastMLP)
    y = module.forward(x, B, *given) if known else None
    if y is None:
        y = np.array(module(to_mlx(x.x.reshape(B, -1, x.x.shape[-1])), *given))
    return y.reshape(len(x.x), -1)


def weight_of(module: nn.Module, size: int, name: str = "weight") -> np.ndarray:
    """Return a parameter ``[size]``, kept from MLX's writes if a program is being recorded."""
    a = module[name] if code.recorded() is None else modules.owned(module[name])
    code.check((size,), **{f"{type(module).__name__}.{name}": a})
    return np.ascontiguousarray(a)


def is_norm(module: nn.Module, kind: type = nn.RMSNorm) -> bool:
    """Whether a module is a norm that ``rowwise.rms_norm`` computes."""
    known = type(module) is modules.with_mixin(modules.Watched, kind)
    return known and not replaced(module.originals) and module["weight"].dtype == mx.float32


def normed(norm: nn.Module, x: np.ndarray, add: np.ndarray | None = None) -> Rows:
    """Apply a norm to rows x, after ``add`` is added to x in place."""
    return Rows(rowwise.rms_norm(x, weight_of(norm, x.shape[-1]), norm.eps, add=add))


def check_cache(a: mx.array, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a cache's array ``[B, ...]`` is not float32 of this shape."""
    if a.shape != shape or a.dtype != mx.float32:
        kind = str(a.dtype).removeprefix("mlx.core.")
        raise ValueError(
            f"cache: expected float32 {shape}, got {kind} {a.shape}: the cache is of other "
            "texts or of another model. Give a cache of this model with one entry for each of the "
            f"{shape[0]} texts of the input."
        )


class GatedDelta(Block):
    """``GatedDeltaNet`` of qwen3_5 and of qwen3_next."""

    def forward_with(self, x, B, found, mask, cache):
        did = self.compute(x, B, found, *self.held(cache, self.zeros(B)))
        if cache is not None:
            self.keep(cache, did)
        return did.y

    def held(self, cache: ArraysCache | None, zeros: tuple) -> list[np.ndarray]:
        """Return a cache's convolution inputs and state, or ``zeros``, with which a text begins."""
        given = (None, None) if cache is None else cache.cache
        for a, zero in zip(given, zeros):
            if a is not None:
                check_cache(a, zero.shape)
        return [z if a is None else np.ascontiguousarray(a) for a, z in zip(given, zeros)]

    def keep(self, cache: ArraysCache, did: Recurred, state: mx.array | None = None) -> None:
        """Put into a cache what the next tokens need; copy ``did.state`` if ``state`` is None."""
        cache[0], cache[1] = to_mlx(did.after), to_mlx(did.state) if state is None else state
        cache.advance(len(did.y) // len(did.after))
        if self.recorder is not None:
            self.recorder.keep(cache, did)

    def knows(self, mask, cache):
        if cache is None or mask is not None:
            return mask is None
        is_known = type(cache) is ArraysCache and cache.lengths is None and len(cache.cache) == 2
        return is_known and all(a is None or a.dtype == mx.float32 for a in cache.cache)

    def own_matrices(self) -> list | None:
        """The block's matrices; None if the kernels cannot compute the block as it is now."""
        conv1d, norm = self["conv1d"], self["norm"]
        parameters = self["A_log"], self["dt_bias"], conv1d["weight"]
        if (
            not self.is_known
            or any(a.dtype != mx.float32 for a in parameters)
            or type(conv1d) is not modules.FAST[nn.Conv1d]
            or "bias" in conv1d
            or not is_norm(norm, self.norm_type)
            or self.head_k_dim % 8
        ):
            return None
        return products(self, *self.projections, "out_proj")

    def zeros(self, B: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a new text's convolution inputs and recurrent state, both 0."""
        before = np.zeros((B, self.conv_kernel_size - 1, self.conv_dim), np.float32)
        return before, np.zeros((B, self.num_v_heads, self.head_v_dim, self.head_k_dim), np.float32)

    def compute(
        self, x: Rows, B: int, found: list, before: np.ndarray, state: np.ndarray
    ) -> Recurred:
        """Compute the block from its matrices, past convolution inputs and state."""
        *projections, out = found
        n, T, norm = len(x.x), len(x.x) // B, self["norm"]
        Hk, Dk, Hv, Dv = self.num_k_heads, self.head_k_dim, self.num_v_heads, self.head_v_dim
        qkv, z, b, a = self.project(x, projections)
        conv1d, (_, past, C) = self["conv1d"], before.shape
        code.check((C, past + 1, 1), **{"conv1d.weight": conv1d["weight"]})
        convolved, after = rowwise.convolve(before, qkv, conv1d.taps.made)
        qk = [convolved[:, i * Hk * Dk : (i + 1) * Hk * Dk].reshape(n, Hk, Dk) for i in range(2)]
        scale = Dk**-0.5
        for heads, by in zip(qk, (scale**2, scale)):
            rowwise.rms_norm(heads, None, 1e-6 * scale**2, scale=by, out=heads)
        q, k = (heads.reshape(B, T, Hk, Dk) for heads in qk)
        v = convolved[:, 2 * Hk * Dk :].reshape(B, T, Hv, Dv)
        decay = np.exp(weight_of(self, Hv, "A_log"))
        g, beta = rowwise.gates(a, b, decay, weight_of(self, Hv, "dt_bias"))
        inputs = q, k, v, *(a.reshape(B, T, Hv) for a in (g, beta)), state
        y, new = gated_delta.recur(*inputs)
        gate, weight = z.reshape(n * Hv, Dv), weight_of(norm, Dv)
        y = rowwise.rms_norm(y.reshape(n * Hv, Dv), weight, norm.eps, gate=gate)
        y = out.multiply(y.reshape(n, Hv * Dv))
        return Recurred(y, before, qkv, after, new, inputs)


class GatedDelta35(GatedDelta):
    """``GatedDelta`` of qwen3_5, with a projection each for ``qkv``, ``z``, ``b`` and ``a``."""

    projections = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
    norm_type = qwen3_5.RMSNormGated

    def project(self, x: Rows, projections: list) -> list[np.ndarray]:
        """Return four arrays ``[n, ...]``: q, k and v in one, then z, b and a."""
        return x.multiply(*projections)


class GatedDeltaNext(GatedDelta):
    """``GatedDelta`` of qwen3_next: two projections, whose outputs are grouped by key head."""

    projections = "in_proj_qkvz", "in_proj_ba"
    norm_type = qwen3_next.Qwen3NextRMSNormGated

    def project(self, x: Rows, projections: list) -> list[np.ndarray]:
        n, Hk, Dk = len(x.x), self.num_k_heads, self.head_k_dim
        qkvz, ba = (y.reshape(n, Hk, -1) for y in x.multiply(*projections))
        ends = np.cumsum([Dk, Dk, self.num_v_heads // Hk * self.head_v_dim])
        *qkv, z = (part.reshape(n, -1) for part in np.split(qkvz, ends, axis=-1))
        b, a = (part.reshape(n, -1) for part in np.split(ba, 2, axis=-1))
        return [np.concatenate(qkv, axis=-1), *map(np.ascontiguousarray, (z, b, a))]


class Attention(Block):
    """The attention of qwen3, qwen3_moe, qwen3_next and qwen3_5. The last two have a gate."""

    def forward_with(self, x, B, found, mask, cache):
        n, T, offset = len(x.x), len(x.x) // B, 0 if cache is None else cache.offset
        angles = [np.tile(a, (B, 1)) for a in self.turns(offset, T)]
        *qkv, gate = self.project(x, found, *angles)
        q, k, v = (a.reshape(B, T, -1, a.shape[-1]).transpose(0, 2, 1, 3) for a in qkv)
        y = self.attend(q, k, v, mask, cache).transpose(0, 2, 1, 3)
        return self.leave(np.ascontiguousarray(y).reshape(n, *gate.shape[1:-1], -1), gate, found)

    def knows(self, mask, cache):
        if cache is None:
            return True
        is_known = isinstance(getattr(cache, "offset", None), int) and not hasattr(cache, "bits")
        keys = getattr(cache, "keys", None)
        return is_known and (keys is None or keys.dtype == mx.float32)

    def own_matrices(self) -> list | None:
        rope = self["rope"]
        if (
            not self.is_known
            or not all(is_norm(self[name]) for name in ("q_norm", "k_norm"))
            or type(rope) is not nn.RoPE
            or rope.traditional
            or rope.dims % 2
        ):
            return None
        return products(self, "q_proj", "k_proj", "v_proj", "o_proj")

    def turns(self, offset: int, T: int) -> list[np.ndarray]:
        """Cosines and sines ``[T, dims / 2]`` of the block's rope, from position ``offset`` on."""
        rope = self["rope"]
        return turns(rope.dims, rope.base, rope.scale, offset, T)

    def project(self, x: Rows, found: list, cos: np.ndarray, sin: np.ndarray) -> list[np.ndarray]:
        """Return queries, keys (both rotated), values, gate (or nothing): ``[n, heads, size]``."""
        if "n_heads" in vars(self):  # qwen3 and qwen3_moe
            H, Hk = self.n_heads, self.n_kv_heads
        else:
            H, Hk = self.num_attention_heads, self.num_key_value_heads
        q, k, v = (y.reshape(len(x.x), n, -1) for y, n in zip(x.multiply(*found[:3]), (H, Hk, Hk)))
        D, turned = k.shape[-1], []
        for name, a in ("q_norm", q[..., :D]), ("k_norm", k):
            turned.append(rowwise.rms_norm(a, weight_of(self[name], D), self[name].eps))
            rowwise.rotate(turned[-1], cos, sin)
        return [*turned, v, q[..., D:]]

    def attend(self, q, k, v, mask, cache):
        """Compute attention of q to the cache's tokens and to k and v: ``[B, heads, T, size]``."""
        if cache is not None:
            # The cache holds MLX arrays, and may be of any of mlx-lm's kinds.
            for name, a in ("keys", k), ("values", v):  # check before the cache is written to
                held = getattr(cache, name, None)
                if held is not None:
                    check_cache(held, (*a.shape[:2], held.shape[2], a.shape[3]))
            k, v = cache.update_and_fetch(*(to_mlx(a) for a in (k, v)))
            mx.eval(k, v)
            if not attention.agree(q, k, v, mask) or {k.dtype, v.dtype} != {mx.float32}:
                raise ValueError(f"cache: expected float32 for {q.shape}, got {k.dtype} {k.shape}")
            k, v = np.asarray(k), np.asarray(v)
        mask = np.asarray(mask) if isinstance(mask, mx.array) else mask
        return attention.attend(q, k, v, self.scale, mask)

    def leave(self, y: np.ndarray, gate: np.ndarray, found: list) -> np.ndarray:
        """Turn attention's result y ``[n, H, size]`` into the block's output ``[n, D]``."""
        n, H, size = y.shape
        y = y.reshape(n * H, size)
        if gate.shape[-1]:
            rowwise.gated(gate.reshape(n * H, size), y, silu=False, out=y)
        return found[-1].multiply(y.reshape(n, H * size))


@lru_cache(maxsize=4)  # all layers of a pass use the same angles
def turns(dims: int, base: float, scale: float, offset: int, T: int) -> list[np.ndarray]:
    """Return cosines and sines of rotary positions, ``[T, dims / 2]`` each, by MLX's rotation."""
    one = mx.concatenate([mx.ones((1, 1, T, dims // 2)), mx.zeros((1, 1, T, dims // 2))], axis=-1)
    turned = mx.fast.rope(one, dims, traditional=False, base=base, scale=scale, offset=offset)
    turned = np.asarray(turned)[0, 0]
    return [np.ascontiguousarray(a) for a in np.split(turned, 2, axis=-1)]


class Experts(Block):
    """A block with a softmax router; in qwen3_next and qwen3_5 it has a shared expert."""

    has_cache = False

    def forward_with(self, x, B, found, mask, cache):
        routed, scores, *shared = self.before_experts(x, B, found)
        return rowwise.combine(self.compute(x, B, routed), scores, None, *shared)

    def own_matrices(self) -> list | None:
        """Return the matrices of the router and the shared gate; None if MLX must compute them."""
        gates = ("gate", "shared_expert_gate") if "shared_expert" in self else ("gate",)
        return products(self, *gates) if self.is_known else None

    def likely(self, x: Rows) -> tuple[np.ndarray, np.ndarray] | None:
        """Return each row's likely experts ``[n, expects]``, and their probabilities; or None."""
        module, found = self["switch_mlp"], self.own_matrices()
        if found is None or not is_itself(module, experts.FastExperts) or not module.expects:
            return None
        (logits,) = x.multiply(found[0])
        return rowwise.route(logits, module.expects, False)

    def route(self, x: Rows) -> np.ndarray | None:
        """Return the experts of each token ``[n, K]``; None if the kernels do not fit."""
        found = self.own_matrices()
        return None if found is None else self._route(x, found)[0]

    def _route(self, x, found):
        (logits,) = x.multiply(found[0])
        return rowwise.route(logits, self.top_k, self.norm_topk_prob)

    def before_experts(self, x: Rows, B: int, found: list) -> tuple:
        """Return experts ``[n, K]`` and scores, and the shared expert's output and gate."""
        routed = self._route(x, found)
        if "shared_expert" not in self:
            return routed
        return *routed, forward(self["shared_expert"], x, B), *x.multiply(found[1])

    def compute(
        self, x: Rows, B: int, routed: np.ndarray, placed: experts.PlacedExperts | None = None
    ) -> np.ndarray:
        """Compute ``[n * K, D]`` with the experts ``[n, K]`` (see ``FastExperts.forward``)."""
        module, (n, K) = self["switch_mlp"], routed.shape
        y = module.forward(x, routed, placed) if is_itself(module, experts.FastExperts) else None
        if y is not None:
            return y
        x = to_mlx(x.x.reshape(B, n // B, -1))
        y = module(x, to_mlx(routed.astype(np.uint32).reshape(B, n // B, K)))
        return np.array(y).reshape(n * K, -1)

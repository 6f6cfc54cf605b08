"""Blocks of mlx-lm that compute without MLX's graph: gated delta, attention, experts, layers.

A block's products, norms and gates are a dozen calls of native code, with arrays of numpy between
them. Computed module by module, each would be evaluated by MLX, which takes 16 to 60 us a time.

A block computes in this way what it knows: text in float32 without padding, projections of
``modules`` without a bias, caches of mlx-lm. With anything else, while it is trained, while a
module in it is hooked, or where another library has replaced a method or function that it stands
for, it goes mlx-lm's way, module by module. A token's result does not depend on how a text is
divided into passes.

For one token of one text a layer's calls are recorded once (``Token``): from then on it is two or
three calls of native code. The record holds memory of its own, so a model must not be called by
several threads at once; ``moelab.load`` sees to that.
"""

import sys
import weakref
from collections import Counter
from functools import cache, lru_cache
from operator import is_, itemgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3_5, qwen3_moe, qwen3_next
from mlx_lm.models.cache import ArraysCache

from ..hooks import unhooked
from . import attention, code, gated_delta, modules, rowwise, team
from .code import to_mlx
from .modules import (
    FastConv1d,
    FastMLP,
    FastSwitchGLU,
    PlacedExperts,
    owned,
    products,
    replaced,
    takes,
)
from .quantized import Rows

# Bytes of a recurrent state. A smaller one is copied in less time than MLX needs to hand over its
# memory (20 to 60 us).
IN_PLACE_NBYTES = 512 * 1024


class Recurred(NamedTuple):
    """What a gated-delta block did in a pass.

    Attributes:
        y (np.ndarray): ``[n, D]``, its output.
        before (np.ndarray): ``[B, width - 1, C]``, what was in the convolution before the tokens.
        qkv (np.ndarray): ``[n, C]``, what the tokens brought.
        after (np.ndarray): ``[B, width - 1, C]``, what is in the convolution after them.
        states (np.ndarray): ``[B, Hv, Dv, Dk]``, or after each token ``[T, B, Hv, Dv, Dk]``.
        inputs (tuple): Of ``gated_delta.recur``.
    """

    y: np.ndarray
    before: np.ndarray
    qkv: np.ndarray
    after: np.ndarray
    states: np.ndarray
    inputs: tuple

    @property
    def conv(self) -> np.ndarray:
        """``[B, width - 1 + T, C]``, what went into the convolution."""
        B, _, C = self.before.shape
        return np.concatenate([self.before, self.qkv.reshape(B, -1, C)], axis=1)

    def into(self, cache: ArraysCache, T: int, state: mx.array | None = None) -> None:
        """Put into a cache what the tokens after these T need.

        Args:
            cache (ArraysCache): The block's.
            T (int): Tokens.
            state (mx.array or None): The state after them. Default: ``states``.
        """
        cache[0], cache[1] = to_mlx(self.after), to_mlx(self.states) if state is None else state
        cache.advance(T)


class Block:
    """Mixed into a block of mlx-lm.

    Attributes:
        of (tuple[type, Callable]): Its class of mlx-lm, and how that was called at first.
        called (tuple): Functions that the class's module calls, by name, as they were at first.
    """

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = None
        if takes(x) and x.ndim == 3:
            y = self.forward(Rows.of(x), x.shape[0], mask, cache)
        if y is None:
            given = {"mask": mask, "cache": cache} if self.has_cache else {}
            return super().__call__(x, **given)
        return to_mlx(y.reshape(x.shape))

    has_cache = True

    def forward(self, x: Rows, B: int, mask: Any = None, cache: Any = None) -> np.ndarray | None:
        """Compute ``[n, D]`` for B texts of as many tokens, ``[n, D]`` in all.

        Returns:
            np.ndarray or None: None, and nothing has changed, if this way does not fit the call.
        """
        raise NotImplementedError

    @property
    def is_known(self) -> bool:
        """Whether nothing that this block stands for has been replaced."""
        names = vars(sys.modules[self.of[0].__module__])
        return not (
            self.training
            or replaced(self)
            or getattr(self, "sharding_group", None) is not None
            or any(names.get(name) is not f for name, f in self.called)
        )


def forward(module: nn.Module, x: Rows, B: int, *given: Any) -> np.ndarray:
    """Call a module of a layer, as a block if it is one, and else through MLX.

    Args:
        module (nn.Module): It is called with x ``[B, T, D]``.
        x (Rows): ``[n, D]``.
        B (int): Texts.
        *given: Mask and cache, if the module takes them.

    Returns:
        np.ndarray: ``[n, D]``, nobody else's.
    """
    if is_itself(module, Block) or is_itself(module, FastMLP):
        y = module.forward(x, B, *given) if isinstance(module, Block) else module.forward(x)
        if y is not None:
            return y
    y = module(to_mlx(x.x.reshape(B, -1, x.x.shape[-1])), *given)
    return np.array(y).reshape(len(x.x), -1)


def is_itself(module: nn.Module, kind: type) -> bool:
    """Whether a call of a module is what ``kind`` defines: no hook, no method of somebody else."""
    return isinstance(module, kind) and type(module).__call__ is kind.__call__


def weight_of(module: nn.Module, name: str = "weight") -> np.ndarray:
    """A parameter in the memory of its array, also when that changes."""
    return np.asarray(module[name] if code.recorded() is None else owned(module[name]))


def is_norm(module: nn.Module, kind: type = nn.RMSNorm) -> bool:
    """Whether a module is a norm that ``rowwise.rms_norm`` computes."""
    return type(module) is kind and module["weight"].dtype == mx.float32


class GatedDelta(Block):
    """``GatedDeltaNet`` of qwen3_5 and of qwen3_next."""

    def forward(self, x, B, mask=None, cache=None):
        did = self.recur(x, B, mask, cache)
        if did is None:
            return None
        if cache is not None:
            did.into(cache, len(x.x) // B)
        return did.y

    def recur(
        self,
        x: Rows,
        B: int,
        mask: Any = None,
        cache: Any = None,
        every: bool = False,
        own_hooks: bool = False,
    ) -> Recurred | None:
        """As ``forward``, and the cache stays as it is.

        Args:
            x, B, mask, cache: As for ``forward``.
            every (bool): Return the state after each token.
            own_hooks (bool): Whether hooks on the convolution are the caller's, which does without.
        """
        found = self.fits(mask, cache, own_hooks)
        if found is None:
            return None
        before, state = self.zeros(B) if cache is None else (cache[0], cache[1])
        if before is None or state is None:
            before, state = self.zeros(B)
        return self.compute(x, B, found, np.asarray(before), np.asarray(state), every)

    def fits(self, mask: Any = None, cache: Any = None, own_hooks: bool = False) -> list | None:
        """The matrices of a call that this way fits, else None. Arguments as ``recur``."""
        conv1d, norm = self["conv1d"], self["norm"]
        kept = () if cache is None else (cache[0], cache[1])
        parameters = self["A_log"], self["dt_bias"], conv1d["weight"]
        if (
            not self.is_known
            or mask is not None
            or not (cache is None or (type(cache) is ArraysCache and cache.lengths is None))
            or any(a is not None and a.dtype != mx.float32 for a in (*kept, *parameters))
            or (unhooked(conv1d) if own_hooks else type(conv1d)) is not FastConv1d
            or "bias" in conv1d
            or not is_norm(norm, self.norm_type)
            or self.head_k_dim % 8
        ):
            return None
        return products(self, *self.projections, "out_proj")

    def zeros(self, B: int) -> tuple[np.ndarray, np.ndarray]:
        """What is in a cache before the first token: of the convolution, and the state."""
        before = np.zeros((B, self.conv_kernel_size - 1, self.conv_dim), np.float32)
        shape = B, self.num_v_heads, self.head_v_dim, self.head_k_dim
        return before, np.zeros(shape, np.float32)

    def compute(
        self,
        x: Rows,
        B: int,
        found: list,
        before: np.ndarray,
        state: np.ndarray,
        every: bool = False,
    ) -> Recurred:
        """As ``recur``.

        Args:
            x, B, every: As there.
            found (list): From ``fits``.
            before, state (np.ndarray): As ``zeros`` returns them.
        """
        *projections, out = found
        n, T, norm = len(x.x), len(x.x) // B, self["norm"]
        Hk, Dk, Hv, Dv = self.num_k_heads, self.head_k_dim, self.num_v_heads, self.head_v_dim
        qkv, z, b, a = self.project(x, projections)
        mixed, after = rowwise.convolve(before, qkv, taps_of(self["conv1d"]))
        qk = [mixed[:, i * Hk * Dk : (i + 1) * Hk * Dk].reshape(n, Hk, Dk) for i in range(2)]
        scale = Dk**-0.5
        for heads, by in zip(qk, (scale**2, scale)):
            rowwise.rms_norm(heads, None, 1e-6 * scale**2, scale=by, out=heads)
        q, k = (heads.reshape(B, T, Hk, Dk) for heads in qk)
        v = mixed[:, 2 * Hk * Dk :].reshape(B, T, Hv, Dv)
        decay = np.exp(np.asarray(self["A_log"]))
        g, beta = rowwise.gates(a, b, decay, weight_of(self, "dt_bias"))
        inputs = q, k, v, *(a.reshape(B, T, Hv) for a in (g, beta)), state
        y, states = gated_delta.recur(*inputs, every)
        gate, weight = z.reshape(n * Hv, Dv), weight_of(norm)
        y = rowwise.rms_norm(y.reshape(n * Hv, Dv), weight, norm.eps, gate=gate)
        y = out.multiply(y.reshape(n, Hv * Dv))
        return Recurred(y, before, qkv, after, states, inputs)


class GatedDelta35(GatedDelta):
    """Of qwen3_5: a projection each."""

    projections = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
    norm_type = qwen3_5.RMSNormGated

    def project(self, x: Rows, projections: list) -> list[np.ndarray]:
        """Four arrays ``[n, ...]``: q, k and v in one, then z, b and a."""
        return x.multiply(*projections)


class GatedDeltaNext(GatedDelta):
    """Of qwen3_next: two projections, in which each head of keys has its part of everything."""

    projections = "in_proj_qkvz", "in_proj_ba"
    norm_type = qwen3_next.Qwen3NextRMSNormGated

    def project(self, x: Rows, projections: list) -> list[np.ndarray]:
        """As in ``GatedDelta35``."""
        n, Hk, Dk = len(x.x), self.num_k_heads, self.head_k_dim
        qkvz, ba = (y.reshape(n, Hk, -1) for y in x.multiply(*projections))
        ends = np.cumsum([Dk, Dk, self.num_v_heads // Hk * self.head_v_dim])
        *qkv, z = (part.reshape(n, -1) for part in np.split(qkvz, ends, axis=-1))
        b, a = (part.reshape(n, -1) for part in np.split(ba, 2, axis=-1))
        return [np.concatenate(qkv, axis=-1), *map(np.ascontiguousarray, (z, b, a))]


def taps_of(conv1d: FastConv1d) -> np.ndarray:
    """``[width, C]``: a convolution's weights, channels side by side; kept until they change."""
    weight = conv1d["weight"]
    kept = conv1d.__dict__.get("_taps")
    if kept is None or kept[0] is not weight:
        kept = weight, np.ascontiguousarray(np.asarray(weight)[..., 0].T)
        conv1d.__dict__["_taps"] = kept
    return kept[1]


class Attention(Block):
    """The attention of qwen3_moe, qwen3_next and qwen3_5. The last two multiply with a gate."""

    def forward(self, x, B, mask=None, cache=None):
        found = self.fits(cache)
        if found is None:
            return None
        n, T, offset = len(x.x), len(x.x) // B, 0 if cache is None else cache.offset
        angles = [np.tile(a, (B, 1)) for a in self.turns(offset, T)]
        *qkv, gate = self.project(x, found, *angles)
        q, k, v = (a.reshape(B, T, -1, a.shape[-1]).transpose(0, 2, 1, 3) for a in qkv)
        mask = np.asarray(mask) if isinstance(mask, mx.array) else mask
        y = self.attend(q, k, v, mask, cache).transpose(0, 2, 1, 3)
        return self.leave(np.ascontiguousarray(y).reshape(n, *gate.shape[1:-1], -1), gate, found)

    def fits(self, cache: Any) -> list | None:
        """The matrices of a call that this way fits, else None."""
        rope = self["rope"]
        if (
            not self.is_known
            or not (cache is None or isinstance(getattr(cache, "offset", None), int))
            or hasattr(cache, "bits")
            or not all(is_norm(self[name]) for name in ("q_norm", "k_norm"))
            or type(rope) is not nn.RoPE
            or rope.traditional
            or rope.dims % 2
        ):
            return None
        return products(self, "q_proj", "k_proj", "v_proj", "o_proj")

    def turns(self, offset: int, T: int) -> list[np.ndarray]:
        """As the function ``turns``, of this block's rope."""
        rope = self["rope"]
        return turns(rope.dims, rope.base, rope.scale, offset, T)

    def project(self, x: Rows, found: list, cos: np.ndarray, sin: np.ndarray) -> list[np.ndarray]:
        """Queries, keys, values, the first two turned, and the gate, which may have no numbers.

        Args:
            x (Rows): ``[n, D]``.
            found (list): From ``fits``.
            cos, sin (np.ndarray): ``[n, R / 2]``, as ``turns`` returns them.

        Returns:
            list[np.ndarray]: ``[n, heads, size of a head]`` each.
        """
        heads = zip(x.multiply(*found[:3]), (self.heads[0], *self.heads[1:] * 2))
        q, k, v = (y.reshape(len(x.x), num, -1) for y, num in heads)
        D, turned = k.shape[-1], []
        for name, a in ("q_norm", q[..., :D]), ("k_norm", k):
            turned.append(rowwise.rms_norm(a, weight_of(self[name]), self[name].eps))
            rowwise.rotate(turned[-1], cos, sin)
        return [*turned, v, q[..., D:]]

    def attend(self, q, k, v, mask, cache):
        """Attention of ``[B, heads, T, size]`` to what is in the cache and to k and v."""
        if cache is not None:
            # The cache's arrays are MLX's, and which kind it is does not matter here.
            k, v = cache.update_and_fetch(*(to_mlx(a) for a in (k, v)))
            mx.eval(k, v)
            k, v = np.asarray(k), np.asarray(v)
        return attention.attend(q, k, v, self.scale, mask)

    def leave(self, y: np.ndarray, gate: np.ndarray, found: list) -> np.ndarray:
        """``[n, D]``, the output for what attention gave ``[n, H, size]``."""
        n, H, size = y.shape
        y = y.reshape(n * H, size)
        if gate.shape[-1]:
            rowwise.multiply_by_sigmoid(y, gate.reshape(n * H, size))
        return found[-1].multiply(y.reshape(n, H * size))


class GatedAttention(Attention):
    """Of qwen3_next and qwen3_5."""

    @property
    def heads(self):
        return self.num_attention_heads, self.num_key_value_heads


class PlainAttention(Attention):
    """Of qwen3_moe."""

    @property
    def heads(self):
        return self.n_heads, self.n_kv_heads


@lru_cache(maxsize=4)  # all layers of a pass turn by the same
def turns(dims: int, base: float, scale: float, offset: int, T: int) -> list[np.ndarray]:
    """Cosines and sines of rotary positions, ``[T, dims / 2]`` each: what MLX turns a 1 into."""
    one = mx.concatenate([mx.ones((1, 1, T, dims // 2)), mx.zeros((1, 1, T, dims // 2))], axis=-1)
    turned = mx.fast.rope(one, dims, traditional=False, base=base, scale=scale, offset=offset)
    turned = np.asarray(turned)[0, 0]
    return [np.ascontiguousarray(a) for a in np.split(turned, 2, axis=-1)]


class Experts(Block):
    """A block with a softmax router: of qwen3_moe, and of qwen3_next and qwen3_5 with a shared one.

    Its experts are ``FastExperts``, or have a method ``forward`` (``streaming.layers``).
    """

    has_cache = False

    def forward(self, x, B, mask=None, cache=None, add=None):
        """As ``Block.forward``.

        Args:
            x, B: As there.
            mask, cache: Not used.
            add (np.ndarray or None): ``[n, D]``, is added to the result.
        """
        found = self.fits()
        if found is None:
            return None
        experts, scores, *shared = self.begin(x, B, found)
        return rowwise.combine(self.experts(x, B, experts), scores, add, *shared)

    def fits(self) -> list | None:
        """The matrices of the router and of the shared expert's gate; None if this way fits not."""
        gates = ("gate", "shared_expert_gate") if self.has_shared else ("gate",)
        return products(self, *gates) if self.is_known else None

    def route(self, x: Rows) -> np.ndarray | None:
        """The experts of each token ``[n, K]``; None if this way does not fit."""
        found = self.fits()
        return None if found is None else self._route(x, found)[0]

    def _route(self, x, found):
        (logits,) = x.multiply(found[0])
        return rowwise.route(logits, self.top_k, self.norm_topk_prob)

    def begin(self, x: Rows, B: int, found: list) -> tuple:
        """All but the experts.

        Returns:
            tuple: The experts of each token ``[n, K]``, their scores, and with a shared expert what
            that gave ``[n, D]`` and its gate ``[n, 1]``.
        """
        routed = self._route(x, found)
        if not self.has_shared:
            return routed
        return *routed, forward(self["shared_expert"], x, B), *x.multiply(found[1])

    def experts(
        self, x: Rows, B: int, routed: np.ndarray, placed: PlacedExperts | None = None
    ) -> np.ndarray:
        """Compute with the experts of each token.

        Args:
            x, B: As for ``forward``.
            routed (np.ndarray): ``[n, K]``.
            placed (PlacedExperts or None): For one token: what computes with experts in memory.

        Returns:
            np.ndarray: ``[n * K, D]``; with ``placed`` it may be ``placed.y``.
        """
        module, (n, K) = self["switch_mlp"], routed.shape
        if unhooked(module) is type(module):
            if is_itself(module, FastSwitchGLU) and not replaced(module):
                found = module.all_matrices()
                if placed is not None and found is not None:
                    placed.compute(range(K), modules.addresses_of(found)[routed.ravel()])
                    return placed.y
                call = module.begin_rows(x, routed.shape)
                if call is not None:
                    call.compute(np.arange(n * K), routed.ravel())
                    return call.y
            elif hasattr(module, "forward"):
                y = module.forward(x, routed, placed)
                if y is not None:
                    return y
        x = to_mlx(x.x.reshape(B, n // B, -1))
        y = module(x, to_mlx(routed.astype(np.uint32).reshape(B, n // B, K)))
        return np.array(y).reshape(n * K, -1)


class ExpertsAlone(Experts):
    has_shared = False


class ExpertsAndShared(Experts):
    has_shared = True


class Layer(Block):
    """A decoder layer: attention or a recurrence, then experts or an MLP, each after a norm."""

    def forward(self, x, B, mask=None, cache=None):
        if len(x.x) == 1 and mask is None and (y := self._replay(x, cache)) is not None:
            return y
        norms = self["input_layernorm"], self["post_attention_layernorm"]
        if not self.is_known or not all(map(is_norm, norms)):
            return None
        first, second = ((weight_of(norm), norm.eps) for norm in norms)
        normed = Rows(rowwise.rms_norm(x.x, *first))
        h = forward(self.mixer, normed, B, mask, cache)
        normed = Rows(rowwise.rms_norm(h, *second, add=x.x))
        mlp = self["mlp"]
        if isinstance(mlp, Experts) and is_itself(mlp, Block):
            y = mlp.forward(normed, B, add=h)
            if y is not None:
                return y
        return h + forward(mlp, normed, B)

    @property
    def mixer(self) -> nn.Module:
        """The attention or the recurrence."""
        return self["linear_attn" if "linear_attn" in self else "self_attn"]

    def _replay(self, x, cache):
        """One token of a text, from a record of this layer's calls; None if that does not fit."""
        token = self.__dict__.get("_token")
        if token is None or not token.is_valid():
            token = self.__dict__["_token"] = Token.of(self)
        return None if token is None else token.run(x, cache)


class DeltaToken:
    """The record of a ``GatedDelta35`` for one token.

    Args:
        mixer (GatedDelta35): The block.
        x (Rows): ``[1, D]``, its input.
        begin (team.Program): What computes that. It goes on here.

    Attributes:
        y (np.ndarray): ``[1, D]``, the block's output.
        end (team.Program): What computes it, and may go on.
    """

    def __init__(self, mixer: GatedDelta35, x: Rows, begin: team.Program):
        self._zeros = mixer.zeros(1)
        with begin.recording():
            self._did = mixer.compute(x, 1, mixer.fits(), *self._zeros)
        self.y, self.end = self._did.y, begin
        self._places = [begin.places(a) for a in (*self._zeros, self._did.states)]

    def takes(self, cache: Any) -> bool:
        """Whether the record can be used with this cache."""
        return (
            type(cache) is ArraysCache
            and cache.lengths is None
            and all(a is None or a.dtype == mx.float32 for a in (cache[0], cache[1]))
        )

    def run(self, cache: ArraysCache) -> None:
        """Compute ``end``, and put into the cache what the next token needs."""
        before, state = (z if a is None else a for a, z in zip(cache.cache, self._zeros))
        in_place = state.nbytes >= IN_PLACE_NBYTES
        if in_place:
            # If nobody else holds the state, MLX writes to its memory, and else to a copy. In
            # either case the memory is nobody else's then, and it becomes the next state.
            state, cache[1] = to_mlx(state), None
            state[0, 0, 0, 0] = float(np.asarray(state)[0, 0, 0, 0])
            mx.eval(state)
            cache[1] = state
        before, now = np.asarray(before), np.asarray(state)
        new = now if in_place else self._did.states
        for places, a in zip(self._places, (before, now, new)):
            for arguments, i in places:
                arguments[i] = code.address(a)
        self.end.run()
        self._did.into(cache, 1, state if in_place else None)


class AttentionToken:
    """As ``DeltaToken``, of an ``Attention``."""

    def __init__(self, mixer: Attention, x: Rows, begin: team.Program):
        self._mixer, self._begin, self.end, found = mixer, begin, team.Program(), mixer.fits(None)
        self._angles = [a.copy() for a in mixer.turns(0, 1)]
        with begin.recording():
            *self._qkv, gate = mixer.project(x, found, *self._angles)
        self._attended = rowwise.empty(1, *gate.shape[1:-1], self._qkv[-1].shape[-1])
        with self.end.recording():
            self.y = mixer.leave(self._attended, gate, found)

    def takes(self, cache: Any) -> bool:
        """As in ``DeltaToken``."""
        return isinstance(getattr(cache, "offset", None), int) and not hasattr(cache, "bits")

    def run(self, cache: Any) -> None:
        """As in ``DeltaToken``."""
        for a, now in zip(self._angles, self._mixer.turns(cache.offset, 1)):
            a[:] = now
        self._begin.run()
        q, k, v = (a.reshape(1, -1, 1, a.shape[-1]) for a in self._qkv)
        y = self._mixer.attend(q, k, v, None, cache)
        self._attended[:] = y.reshape(self._attended.shape)
        self.end.run()


class Token:
    """One token's way through a layer, recorded: two calls of native code, the experts between.

    Args:
        layer (Layer): One that ``of`` takes.
    """

    def __init__(self, layer: Layer):
        mixer, mlp = layer.mixer, layer["mlp"]
        first, second = layer["input_layernorm"], layer["post_attention_layernorm"]
        self._mlp, self._x = mlp, rowwise.empty(1, first["weight"].size)
        begin, self._last = team.Program(), team.Program()
        with begin.recording():
            normed = Rows(rowwise.rms_norm(self._x, weight_of(first), first.eps))
        kind = DeltaToken if isinstance(mixer, GatedDelta35) else AttentionToken
        self._mixed = kind(mixer, normed, begin)
        with self._mixed.end.recording():
            h = self._mixed.y
            normed = Rows(rowwise.rms_norm(h, weight_of(second), second.eps, add=self._x))
            self._routed, scores, *shared = mlp.begin(normed, 1, mlp.fits())
            self._experts = PlacedExperts(mlp["switch_mlp"], normed, self._routed.size)
        with self._last.recording():
            self._out = rowwise.combine(self._experts.y, scores, h, *shared)
        self._normed = normed.x
        # What the record stands on: the modules, how they are called, and what is in them.
        # A reference to the layer is weak: a cycle would keep the memory of a model that is gone.
        (_, *self._own), *inside = _inside(layer)
        self._layer, self._inside = weakref.ref(layer), inside
        self._calls = {m.of for m in (layer, *(m for m, *_ in inside)) if hasattr(m, "of")}
        self._names = [(vars(sys.modules[m.of[0].__module__]), m.called) for m in (layer, mixer)]

    @classmethod
    def of(cls, layer: Layer) -> "Token | None":
        """The record of a layer; None if it cannot be recorded."""
        mixer, mlp, shared = layer.mixer, layer["mlp"], layer["mlp"].get("shared_expert")
        norms = layer["input_layernorm"], layer["post_attention_layernorm"]
        known = (
            is_itself(mixer, Block)
            and isinstance(mixer, (GatedDelta35, Attention))
            and is_itself(mlp, Block)
            and isinstance(mlp, Experts)
            and (shared is None or (is_itself(shared, FastMLP) and shared.fits() is not None))
            and layer.is_known
            and all(map(is_norm, norms))
            and None not in (mixer.fits(cache=None), mlp.fits())
            and PlacedExperts.takes(mlp["switch_mlp"])
        )
        return cls(layer) if known else None

    def is_valid(self) -> bool:
        """Whether nothing has changed that the record stands on."""
        for m, cls, kept, size, parts_of, parts in (self._layer(), *self._own), *self._inside:
            if type(m) is not cls or m._training or m.__dict__.get("_kept") is not kept:
                return False
            if len(m) != size or not all(map(is_, parts_of(m), parts)):
                return False
        return (
            all(cls.__call__ is call for cls, call in self._calls)
            and all(names.get(n) is f for names, called in self._names for n, f in called)
            and PlacedExperts.takes(self._mlp["switch_mlp"])
        )

    def run(self, x: Rows, cache: Any) -> np.ndarray | None:
        """The layer's output ``[1, D]``, in memory that the next run writes to.

        Args:
            x (Rows): ``[1, D]``.
            cache (Any): Of the layer.

        Returns:
            np.ndarray or None: None if the record cannot be used with this cache.
        """
        if not self._mixed.takes(cache):
            return None
        self._x[:] = x.x
        self._mixed.run(cache)
        y = self._mlp.experts(Rows(self._normed), 1, self._routed, self._experts)
        if y is not self._experts.y:
            self._experts.y[:] = y
        self._last.run()
        return self._out


def _inside(layer):
    """A layer's modules but for its experts, with their classes and what is in them."""
    for name, m in layer.named_modules():
        if not name.startswith("mlp.switch_mlp"):
            keys = [k for k, a in m.items() if isinstance(a, (mx.array, nn.Module))]
            # With two keys or more it gives a tuple; so one is there twice.
            parts_of = itemgetter(keys[0], *keys) if keys else tuple
            yield m, type(m), m.__dict__.get("_kept"), len(m), parts_of, parts_of(m)


BLOCKS = {
    qwen3_5.GatedDeltaNet: GatedDelta35,
    qwen3_next.Qwen3NextGatedDeltaNet: GatedDeltaNext,
    qwen3_next.Qwen3NextAttention: GatedAttention,
    qwen3_moe.Attention: PlainAttention,
    qwen3_next.Qwen3NextSparseMoeBlock: ExpertsAndShared,
    qwen3_moe.Qwen3MoeSparseMoeBlock: ExpertsAlone,
    qwen3_5.DecoderLayer: Layer,
    qwen3_next.Qwen3NextDecoderLayer: Layer,
    qwen3_moe.Qwen3MoeDecoderLayer: Layer,
}
# Functions of mlx-lm that blocks stand for.
CALLED = ("gated_delta_update", "scaled_dot_product_attention")


def use(model: nn.Module, half_scales: bool = False) -> dict[str, int]:
    """Let a model's layers compute with these kernels: matrices, attention, recurrences, blocks.

    While the model is trained (``model.train()``) they compute with MLX's: these kernels have no
    gradients. After a parameter's array was changed in place, assign it again.

    Args:
        model (nn.Module): Any model of mlx-lm. It is changed in place.
        half_scales (bool): Whether matrices with scales in bfloat16 get float32 inputs. Without
            it they are left to MLX.

    Returns:
        dict[str, int]: How many modules with weights compute with the kernels (``fast``) and with
        MLX's (``mlx``).
    """
    found = Counter(fast=0, mlx=0)
    types = (mx.float32, mx.bfloat16) if half_scales else (mx.float32,)
    for module in reversed(list(model.modules())):  # a module after those in it
        cls, computes = type(module), modules.use(module, types)
        if computes is not None:
            found["fast" if computes else "mlx"] += 1
        gated_delta.use(module)
        attention.use(module)
        if cls in BLOCKS:
            module.__class__ = _fast(cls, type(module))
    return dict(found)


def blocks_of(model: nn.Module) -> dict[str, int]:
    """How many blocks of a model compute in one piece, by mlx-lm's name of their class.

    Args:
        model (nn.Module): One that ``use`` has changed.
    """
    return dict(Counter(type(m).__name__ for m in model.modules() if isinstance(m, Block)))


@cache
def _fast(cls, now):
    names = vars(sys.modules[cls.__module__])
    called = tuple((name, names[name]) for name in CALLED if name in names)
    kept = {"__module__": cls.__module__, "of": (cls, cls.__call__), "called": called}
    return type(cls.__name__, (BLOCKS[cls], now), kept)

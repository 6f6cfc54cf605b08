"""Decoder layers that compute without MLX's graph, and ``use``, which puts kernels into a model.

A layer's native calls are recorded in a short pass of one text. Two or three calls repeat them in
later passes of the same length. The records of a model share memory, so only one thread may call
the model at a time.
"""

import sys
import weakref
from collections import Counter
from functools import cache
from itertools import chain
from operator import call, is_, itemgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3, qwen3_5, qwen3_moe, qwen3_next
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.switch_layers import SwitchGLU

from ..hooks import call_instead, replaced
from . import attention, blocks, code, experts, gated_delta, modules, rowwise, team
from .blocks import Experts, GatedDelta35, forward, is_norm, normed
from .code import to_mlx
from .modules import FastMLP, Kept, is_itself
from .quantized import Rows

# A recurrent state of at least this size is written in place; a smaller state is copied faster.
IN_PLACE_NBYTES = 512 * 1024
MOST_TOKENS = 16  # a pass of more tokens is not recorded
STATE = itemgetter("_kept", "_training")  # two of a module's attributes, for ``_state``


class Layer(blocks.Block):
    """A decoder layer. All layers of a model share one ``memory`` for what they record."""

    def forward(self, x, B, mask=None, cache=None):
        if B == 1 and len(x.x) <= MOST_TOKENS and cache is not None:
            y = self._replay(x, mask, cache)
            if y is not None:
                return y
        if not self.is_known:
            return None
        (before, after), mlp = self.norms, self["mlp"]
        if is_itself(mlp, Experts) and len(x.x) <= MOST_TOKENS:
            module = mlp["switch_mlp"]
            if getattr(module, "expecting", False) and (likely := mlp.likely(normed(after, x.x))):
                module.expect(*likely)
        h = forward(self.mixer, normed(before, x.x), B, mask, cache)
        inside = normed(after, h, add=x.x)  # adds x to h in place
        return h + forward(mlp, inside, B)

    @property
    def is_known(self) -> bool:
        return super().is_known and all(map(is_norm, self.norms))

    @property
    def norms(self) -> tuple[nn.Module, nn.Module]:
        """The norm before the mixer and the norm before the MLP."""
        return self["input_layernorm"], self["post_attention_layernorm"]

    @property
    def mixer(self) -> nn.Module:
        """The attention or the recurrence."""
        return self["linear_attn" if "linear_attn" in self else "self_attn"]

    def _replay(self, x, mask, cache):
        """Compute a short pass from a record of the layer's calls; None if no record fits."""
        passes, n = self.__dict__["_passes"], len(x.x)
        found = passes.get(n)
        if found is not None and not found.is_valid():
            found = passes.clear()  # all records hold the same modules: none is valid
        if found is None:
            found = passes[n] = Pass.of(self, n)
        return None if found is None else found.run(x, mask, cache)


class DeltaPass:
    """The record of a ``GatedDelta35`` for a short pass: one program, ``end``."""

    def __init__(self, mixer, x, first):
        self._mixer, self._zeros = mixer, mixer.zeros(1)
        with first.recording():
            self._did = mixer.compute(x, 1, mixer.own_matrices(), *self._zeros)
        self.y, self.end = self._did.y, first
        self._places = [first.places(a) for a in (*self._zeros, self._did.state)]

    def run(self, mask: None, cache: ArraysCache) -> None:
        """Run ``end``, and put into the cache what the next token needs."""
        before, now = self._mixer.held(cache, self._zeros)
        kept = self._mixer.recorder is not None
        in_place = not kept and now.nbytes >= IN_PLACE_NBYTES
        if in_place:
            # MLX writes a number into the state's memory if nobody else holds that memory, else
            # into a copy. Either way only this pass holds the result, which becomes the next state.
            state = to_mlx(now) if now.flags.owndata else mx.array(cache[1])
            del now
            cache[1] = None
            state[0, 0, 0, 0] = float(np.asarray(state)[0, 0, 0, 0])
            mx.eval(state)
            cache[1] = state
            now = np.asarray(state)
        did = self._did._replace(before=before)
        new = now if in_place else did.state
        for places, a in zip(self._places, (did.before, now, new)):
            team.put(places, a)
        self.end.run()
        if kept:  # the recorder keeps the inputs, and the next run would overwrite them
            did = did._replace(inputs=(*(a.copy() for a in did.inputs[:-1]), now))
        self._mixer.keep(cache, did, state if in_place else None)


class AttentionPass:
    """The record of an ``Attention`` for a short pass: two programs, with attention between."""

    def __init__(self, mixer, x, first):
        self._mixer, self._first, found = mixer, first, mixer.own_matrices()
        self.end = team.Program(first.memory)
        self._angles = [a.copy() for a in mixer.turns(0, len(x.x))]
        with first.recording():
            *self._qkv, gate = mixer.project(x, found, *self._angles)
        self._attended = first.memory.empty(*gate.shape[:-1], self._qkv[-1].shape[-1])
        with self.end.recording():
            self.y = mixer.leave(self._attended, gate, found)

    def run(self, mask: Any, cache: Any) -> None:
        n = len(self.y)
        for a, now in zip(self._angles, self._mixer.turns(cache.offset, n)):
            a[:] = now
        self._first.run()
        q, k, v = (a.swapaxes(0, 1)[None] for a in self._qkv)
        self._attended[:] = self._mixer.attend(q, k, v, mask, cache)[0].swapaxes(0, 1)
        self.end.run()


class Pass:
    """A recorded pass of n tokens through a layer: two or three native calls, and the experts."""

    def __init__(self, layer: Layer, n: int):
        mixer, mlp, memory, (before, after) = layer.mixer, layer["mlp"], layer.memory, layer.norms
        memory.rewind()
        self._mixer, self._mlp, self._x = mixer, mlp, memory.empty(n, before["weight"].size)
        first, self._last = team.Program(memory), team.Program(memory)
        ahead = team.Program(memory)
        with ahead.recording():  # this program runs the router before attention
            likely = mlp.likely(normed(after, self._x))
        self._ahead = likely and (ahead, mlp["switch_mlp"], likely)
        with first.recording():
            x = normed(before, self._x)
        kind = DeltaPass if isinstance(mixer, GatedDelta35) else AttentionPass
        self._mixed = kind(mixer, x, first)
        with self._mixed.end.recording():
            h = self._mixed.y
            x = normed(after, h, add=self._x)
            self._routed, scores, *shared = mlp.before_experts(x, 1, mlp.own_matrices())
            y, self._experts = memory.empty(scores.size, x.x.shape[-1]), None
            if n == 1:
                found = mlp["switch_mlp"].all_matrices()
                self._experts = experts.PlacedExperts(found, x, scores.size)
        with self._last.recording():
            self._out = rowwise.combine(y, scores, h, *shared)
        self._normed, self._y = x.x, self._last.places(y)
        # What must stay the same: the modules, how they are called, and their arrays. The layer
        # holds the record, so the record must not hold the layer.
        all_own = [m for name, m in layer.named_modules() if not name.startswith("mlp.switch_mlp")]
        for m in all_own:
            m.__dict__.setdefault("_kept", Kept())  # ``Watched`` drops ``_kept`` at a change
        self._layer, self._inside = weakref.ref(layer), all_own[1:]
        self._parts_of, self._state = [*map(_arrays_of, all_own)], _state(all_own)
        self._parts = [*chain(*map(call, self._parts_of, all_own))]
        self._originals = {*chain(*(getattr(m, "originals", ()) for m in all_own))}

    @classmethod
    def of(cls, layer: Layer, n: int) -> "Pass | None":
        """Record a layer; return None if the layer cannot be recorded."""
        mixer, mlp, shared = layer.mixer, layer["mlp"], layer["mlp"].get("shared_expert")
        known = (
            is_itself(mixer, (GatedDelta35, blocks.Attention))
            and is_itself(mlp, Experts)
            and (shared is None or (is_itself(shared, FastMLP) and shared.own_matrices()))
            and layer.is_known
            and None not in (mixer.own_matrices(), mlp.own_matrices())
            and is_itself(mlp["switch_mlp"], experts.FastExperts)
            and mlp["switch_mlp"].all_matrices() is not None
        )
        return cls(layer, n) if known else None

    def is_valid(self) -> bool:
        """Whether the modules, methods and arrays that were recorded are still the same."""
        all_own = [self._layer(), *self._inside]
        try:
            parts = chain.from_iterable(map(call, self._parts_of, all_own))
            same = _state(all_own) == self._state and all(map(is_, parts, self._parts))
        except KeyError:  # an array or ``_kept`` is gone
            return False
        return same and not replaced(self._originals)

    def run(self, x: Rows, mask: Any, cache: Any) -> np.ndarray | None:
        """Compute ``[n, D]``, which the next run overwrites; None if the call does not fit."""
        if x.x.shape != self._x.shape or not self._mixer.knows(mask, cache):
            return None
        self._x[:] = x.x
        if self._ahead is not None and self._ahead[1].expecting:
            program, module, likely = self._ahead
            program.run()
            module.expect(*likely)
        self._mixed.run(mask, cache)
        y = self._mlp.compute(Rows(self._normed), 1, self._routed, self._experts)
        team.put(self._y, y)
        self._last.run()
        return self._out


def _state(modules):
    """Return what, beside arrays, must stay equal; hooks may change the layer's class."""
    return [*map(type, modules[1:]), *map(len, modules), *map(STATE, map(vars, modules))]


def _arrays_of(m):
    """Return a function that gives a module's present arrays and child modules."""
    keys = [k for k, a in m.items() if isinstance(a, (mx.array, nn.Module))]
    # For one key ``itemgetter`` gives no tuple, so the first key is given twice.
    return itemgetter(keys[0], *keys) if keys else tuple


BLOCKS = {
    qwen3_5.GatedDeltaNet: GatedDelta35,
    qwen3_next.Qwen3NextGatedDeltaNet: blocks.GatedDeltaNext,
    qwen3_next.Qwen3NextAttention: blocks.Attention,
    qwen3_moe.Attention: blocks.Attention,
    qwen3.Attention: blocks.Attention,
    qwen3_next.Qwen3NextSparseMoeBlock: Experts,
    qwen3_moe.Qwen3MoeSparseMoeBlock: Experts,
    qwen3_5.DecoderLayer: Layer,
    qwen3_next.Qwen3NextDecoderLayer: Layer,
    qwen3_moe.Qwen3MoeDecoderLayer: Layer,
    qwen3.TransformerBlock: Layer,
}
NORMS = nn.RMSNorm, qwen3_5.RMSNormGated, qwen3_next.Qwen3NextRMSNormGated
# Functions of mlx-lm, and what replaces them in layers that are not blocks. Blocks call neither.
CALLED = {
    "gated_delta_update": gated_delta.fast_update,
    "scaled_dot_product_attention": attention.eager_attention,
}


def use(model: nn.Module, half_scales: bool = False) -> dict[str, int]:
    """Let a model compute with these kernels. Return how many modules do, and how many do not.

    In training (``model.train()``) layers compute with MLX: these kernels have no gradients. Assign
    a parameter again if you got it as ``module["name"]`` and changed it in place.
    """
    found, memory = Counter(fast=0, mlx=0), code.Memory()
    types = (mx.float32, mx.bfloat16) if half_scales else (mx.float32,)
    for module in reversed(list(model.modules())):  # children before their module
        cls = type(module)
        if cls in modules.FAST:
            computes = modules.fits(module, types)
            found["fast" if computes else "mlx"] += 1
            if computes:
                module.__class__ = modules.FAST[cls]
        elif modules.is_mlp(cls):
            module.__class__ = modules.with_mixin(FastMLP, cls)
        elif cls is SwitchGLU and experts.gate_up_down(module):
            module.__class__ = experts.FastSwitchGLU
        for name, fast in CALLED.items():
            call_instead(module, name, fast)
        if cls in BLOCKS:
            module.__class__ = _fast(cls, type(module))
            for norm in module.children().values():
                if type(norm) in NORMS:
                    norm.__class__ = modules.with_mixin(modules.Watched, type(norm))
        if isinstance(module, Layer):
            module.__dict__.update(memory=memory, _passes={})
    return dict(found)


def blocks_of(model: nn.Module) -> dict[str, int]:
    """Count the blocks that the kernels compute as a whole, by their class name in mlx-lm."""
    return dict(Counter(type(m).__name__ for m in model.modules() if isinstance(m, blocks.Block)))


@cache
def _fast(cls, now):
    home = sys.modules[cls.__module__]
    called = [(home, name, getattr(home, name)) for name in CALLED if hasattr(home, name)]
    kept = {"__module__": cls.__module__, "originals": ((cls, "__call__", cls.__call__), *called)}
    return type(cls.__name__, (BLOCKS[cls], now), kept)

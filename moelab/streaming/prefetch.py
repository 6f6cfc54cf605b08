"""Prefetching: a prefetcher guesses which experts this layer or the next one will need.

Reads of guessed experts begin immediately where reads go past the page cache. Elsewhere threads
read guessed experts after the experts that a layer waits for.
"""

from contextlib import suppress
from itertools import pairwise
from time import perf_counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from ..system import on_cuda
from .counters import Counting
from .facts import FEW_TOKENS
from .residency.residency import Residency
from .session import Session
from .trace import Trace
from .trial import Trial

# ``Router`` names an expert of a token's top-k if it is at least ``SURE`` times as probable as the
# first expert outside the top-k. Measured with tiny-moe's held-out text and 16 slots for 64
# experts: 84% of the named experts in no slot are needed; those are 61% of all misses. If
# ``Router`` named the whole top-k, 71% would be needed: 76% of all misses.
SURE = 1.5
# ``Router`` reads the experts that it names in a layer if, of the experts that it named there so
# far, at least this share was needed. On a machine where reads take the cores' time, a wrong guess
# cost about twice what a right guess gained (one run, n=4).
WORTH = 0.66


class Prefetcher:
    """Guesses which experts the next layer will need; ``blocks[i]`` calls ``layers[i]``."""

    # How many likely experts of each token a layer's own router names before attention. Only
    # ``Router`` asks for any.
    asks_early = 0

    def __init__(self, layers: list[nn.Module], blocks: list[nn.Module]):
        self._layers, self._blocks = layers, blocks

    def ask(self, layer: int, x: mx.array | kernels.Rows) -> list:
        """Lazy arrays for ``guess``; the caller evaluates them together with the routing of x."""
        return []

    def guess(self, layer: int, asked: list) -> tuple[int, np.ndarray] | None:
        """The next layer's number and its guessed experts, ``[..., K]``; None: no guess."""
        return None


class Lookahead(Prefetcher):
    """Asks the next layer's router with this layer's hidden state (MoE-Infinity; ds4 issue 849)."""

    def __init__(self, layers: list[nn.Module], blocks: list[nn.Module]):
        super().__init__(layers, blocks)
        for before, layer in pairwise(layers):
            try:  # a block may need more than ``x``, or an ``x`` of another width than experts get
                self._ask(layer.index, mx.zeros((1, 1, before.input_dims), layer.session.dtype))
            except Exception as e:
                raise ValueError(
                    f"StreamConfig.prefetch='lookahead': {layer.path}: this family's router "
                    f"cannot be asked before its layer is called ({e}). Use prefetch='none'."
                ) from e

    def ask(self, layer: int, x: mx.array | kernels.Rows) -> list:
        if layer + 1 == len(self._layers):
            return []
        if isinstance(x, kernels.Rows):
            route = getattr(self._blocks[layer + 1], "route", lambda x: None)
            if (routed := route(x)) is not None:
                return [routed]
            x = kernels.to_mlx(x.x)
        return self._ask(layer + 1, x if x.ndim > 2 else x[None])

    def _ask(self, layer, x):
        """Call a layer's block with ``x [B, T, D]``, and return the routing that comes out."""
        asked = []
        experts = self._layers[layer]
        experts.probe = asked.append  # the block passes its routing to ``probe``
        try:
            self._blocks[layer](x)
        finally:
            experts.probe = None
        return asked

    def guess(self, layer: int, asked: list) -> tuple[int, np.ndarray] | None:
        return (layer + 1, np.array(asked[0])) if asked else None


class Oracle(Prefetcher):
    """Takes its guesses from a recorded trace, until the trace ends: no guess can be better."""

    _rows, _next = (), 0

    def set_trace(self, trace: Trace) -> None:
        """Take guesses from a trace of this model and prompt, from its first decoded token on."""
        rows, L = trace.experts[trace.phase == "decode"], len(self._layers)
        if rows.shape[1] != L:
            raise ValueError(
                f"set_trace: expected a trace of {L} layers, got {rows.shape[1]}. "
                "Record it with this model."
            )
        self._rows, self._next = rows, 0

    def guess(self, layer: int, asked: list) -> tuple[int, np.ndarray] | None:
        following = (layer + 1) % len(self._layers)
        if following == 0:
            self._next += 1
        if self._next >= len(self._rows):
            return None
        return following, self._rows[self._next][following]


class Router(Prefetcher):
    """Asks a layer's own router before attention or recurrence, and reads the experts it names."""

    def __init__(self, layers: list[nn.Module], blocks: list[nn.Module]):
        super().__init__(layers, blocks)
        unknown = [m.path for m, block in zip(layers, blocks) if not hasattr(block, "likely")]
        if unknown:
            raise ValueError(
                f"StreamConfig.prefetch='router': {unknown[0]}: expected a decoder layer that the "
                "fast kernels compute in one piece on a CPU, got one that MLX computes, whose "
                "router would be waited for twice. Use prefetch='lookahead' or 'none'."
            )
        self._top_k, E = layers[0].session.top_k, min(m.num_experts for m in layers)
        self.asks_early = min(2 * self._top_k, E)
        # ``_next`` is the place, in a router's order, of the first expert outside the top-k. All
        # experts are sure if K is E.
        self._next, self._sure = min(self._top_k, E - 1), SURE if self._top_k < E else 0.0
        self._named, self._right = [()] * len(layers), [1.0] * len(layers)

    def choose(self, layer: int, likely: np.ndarray, p: np.ndarray) -> tuple[list[int], list[int]]:
        """Of the ``likely`` experts ``[n, asks_early]``, return those to read and those to keep."""
        sure = p >= self._sure * p[:, self._next : self._next + 1]
        sure[:, self._top_k :] = False
        self._named[layer] = named = dict.fromkeys(likely[sure].tolist())
        return [*named] if self._right[layer] >= WORTH else [], likely.ravel().tolist()

    def learn(self, layer: int, needed: set[int]) -> None:
        """Update the share of named experts that are ``needed``, a mean over some 16 calls."""
        named, self._named[layer] = self._named[layer], ()
        if named:
            share = sum(e in needed for e in named) / len(named)
            self._right[layer] += (share - self._right[layer]) / 16


PREFETCHERS = {"lookahead": Lookahead, "oracle": Oracle, "router": Router}


def auto(session: Session, blocks: list[nn.Module]) -> Prefetcher | None:
    """The prefetcher that may save time here: ``Router``, or ``Lookahead`` on a Mac's GPU."""
    layers, slots = session.layers, session.residency.layers  # [] in a mode without slots
    if on_cuda() or session.ranks or session.config.source == "host":
        return None
    if all(layer.table.num_slots >= layer.num_experts for layer in slots):
        return None  # all experts fit: none is missing once all have been read
    with suppress(ValueError):  # the prefetcher cannot ask this family's routers
        return (Lookahead if mx.default_device() == mx.gpu else Router)(layers, blocks)


class Auto:
    """Turns the prefetcher on and off from call to call, by a ``Trial`` for each number of tokens.

    A short call is timed up to its last layer's experts. After them reads ahead change nothing.
    """

    def __init__(self, residency: Residency, counting: Counting, starts: bool):
        self._residency, self._counting, self._starts = residency, counting, starts
        self._trials, self._call = {}, None  # a trial for each number of tokens; the running call

    def begin(self, tokens: int) -> None:
        """Begin to time a call of the whole model."""
        self._call, counters = None, self._counting.now
        if tokens > FEW_TOKENS:  # a prompt: nothing is read early, and another text may follow
            for trial in self._trials.values():
                trial.part()
            return
        trial = self._trials.get(tokens)
        if trial is None:
            trial = self._trials[tokens] = Trial(self._starts)
        self._residency.prefetches = trial.on
        missing = counters.misses + counters.prefetch_used
        self._call = trial, counters, missing, perf_counter()

    def end(self) -> None:
        """Time the call, which has ended without an exception."""
        call, self._call = self._call, None
        if call is not None:
            trial, counters, before, begin = call
            missing = counters.misses + counters.prefetch_used - before
            slots = self._residency.layers[0].table.num_slots
            trial.took(perf_counter() - begin, missing, slots)

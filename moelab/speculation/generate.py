"""Draft, verify, roll back: several tokens for one pass of the target, and the target's own text."""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn


class Draft(Protocol):
    """Guesses the target's next tokens. What it guesses decides the speed, never the text.

    One sequence, B = 1. A round is: `propose`, one pass of the target over `[last, *proposed]`, `extend` with what was committed. `last` is chosen
    and yielded but no model has read it yet; `extend` names it in the round that reads it. Drafts that were refused are never extended, so a draft
    that kept state for them takes it out again in `extend`.
    """

    layer_ids: Sequence[int]
    """Decoder layers of the target whose outputs it reads (0: the first one); () for none."""

    cache: list
    """Its own state as mlx-lm caches, so that it can be saved and go on later; [] for none. Set by `bind`."""

    def make_cache(self) -> list:
        """Caches for a new sequence, in the order of `cache`; [] for none."""

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        """Start a sequence for this target: state of an earlier sequence is dropped, or with `cache` taken up where `cache` ends.

        Raises ValueError: the draft does not fit the target (vocabulary, hidden size, layer ids), in one message that says what was expected and got.
        """

    def extend(self, tokens: mx.array, features: mx.array | None) -> None:
        """Take note of `tokens` [n], which the target has read (the prompt first, in chunks), with `features` [n, len(layer_ids) * D], None without
        `layer_ids`. Called for every token, also while nothing is drafted, so it must cost next to nothing: queue, and do the work in `propose`."""

    def propose(self, last: int, n: int, choose: Callable[[mx.array], mx.array]) -> mx.array:
        """At most `n` tokens, uint32 [<= n], to follow `last`. With n = 0 it only brings `cache` up to date with what was extended, without `last`.

        `choose(logits [k, V]) -> tokens [k]`, lazy, applies the caller's processors and sampler. Call it for the positions in their order, one row or
        several at a time. It draws with the random numbers that the target will use at the same positions, which is why no probabilities are returned:
        where draft and target agree about a distribution they choose the same token.
        """

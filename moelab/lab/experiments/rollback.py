"""Two faulty ways to take tokens back, for notebooks 06 and 08, and how far states are off."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ...speculation.rollback import Rollback


class RestoreOnly:
    """A faulty rollback: the recurrent state from before the pass, without the accepted tokens.

    It is SwiftLM's ``MambaCache.trim``. Attention caches are trimmed as they should be.
    """

    def __init__(self, model: nn.Module, cache: list):
        self.model, self.cache = model, cache

    def __call__(self, tokens: mx.array) -> mx.array:
        self._before = [list(c.cache) if isinstance(c, ArraysCache) else None for c in self.cache]
        return self.model(tokens, cache=self.cache)

    def undo(self, n: int) -> None:
        for c, before in zip(self.cache, self._before):
            if before is None:
                c.trim(n)
            elif n:
                c.cache = before

    def commit(self) -> None:
        pass


class StaleState(RestoreOnly):
    """A faulty rollback: rejected tokens stay in the recurrent state, as in SwiftLM's DFlash path.

    Only caches that can be trimmed are trimmed.
    """

    def undo(self, n: int) -> None:
        for c in self.cache:
            if not isinstance(c, ArraysCache):
                c.trim(n)


REMEDIES = {"stale state": StaleState, "restore only": RestoreOnly, "exact": Rollback}


def read_ids(model: nn.Module, ids: list[int]) -> list:
    """Make a cache that has read some tokens."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache), [c.state for c in cache])
    return cache


def states(cache: list) -> list[np.ndarray]:
    """The recurrent states of a cache."""
    layers = (c for c in cache if isinstance(c, ArraysCache))
    return [np.array(a.astype(mx.float32)) for c in layers for a in c.cache]


def distance(cache: list, other: list) -> float:
    """The norm of the difference of two caches' states, over the norm of the other's."""
    mine, theirs = states(cache), states(other)
    difference = sum(((a - b) ** 2).sum() for a, b in zip(mine, theirs))
    return float(np.sqrt(difference / sum((b**2).sum() for b in theirs)))


def next_token(model: nn.Module, cache: list, token: int) -> np.ndarray:
    """The probabilities ``[V]`` of the token after one more; the cache is left as it was."""
    rollback = Rollback(model, cache)
    p = np.array(mx.softmax(rollback(mx.array([[token]]))[0, -1].astype(mx.float32)))
    rollback.undo(1)
    return p

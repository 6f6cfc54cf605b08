"""Two faulty ways to take tokens back, for notebooks 06 and 08."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ...speculation.rollback import Rollback


class RestoreOnly:
    """A faulty rollback (SwiftLM's ``MambaCache.trim``): it also takes accepted tokens back.

    ``undo`` sets the recurrent state back to before the pass, and trims attention caches correctly.
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
    """A faulty rollback (SwiftLM's DFlash path): rejected tokens stay in the recurrent state."""

    def undo(self, n: int) -> None:
        for c in self.cache:
            if not isinstance(c, ArraysCache):
                c.trim(n)


REMEDIES = {"stale state": StaleState, "restore only": RestoreOnly, "exact": Rollback}


def read_ids(model: nn.Module, ids: list[int]) -> list:
    """Make a cache that has read ``ids``."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids]), cache=cache), [c.state for c in cache])
    return cache

"""Caches of earlier prompts and answers, for later prompts with the same beginning."""

import copy
import itertools
import sys
import weakref
from collections import deque

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import LRUPromptCache

from ...memory import return_free_memory
from ...streaming.plan import memory_now

MODEL = "model"  # LRUPromptCache has a key for the model, and a server has one model


class _Kept(list):
    """A text's caches in mlx-lm's store. A weak reference to them tells when they are forgotten."""


class Prompts:
    """Caches of ``size`` earlier prompts and answers, of at most ``nbytes`` together.

    Prompts are forgotten while less than ``free_nbytes`` of memory are free. ``free_nbytes`` is 0
    with ranks, since all ranks must keep the same prompts. ``files`` (``PromptFiles``) has an
    earlier server's prompts, and ``close`` saves this server's. One thread calls the methods.
    """

    def __init__(self, size=10, nbytes=sys.maxsize, free_nbytes=0, files=None):
        self._lru, self._free_nbytes, self._files = LRUPromptCache(size, nbytes), free_nbytes, files
        self._kept, self._numbers = weakref.WeakValueDictionary(), itertools.count()  # oldest first
        self._latest = deque(maxlen=16)  # tokens of prompts, to find where the next prompts differ
        free = memory_now()[1] - free_nbytes if free_nbytes else sys.maxsize
        for prompt in files.read(size, min(free, nbytes)) if files is not None else ():
            self.keep(*prompt)

    def close(self) -> None:
        """Save what is kept, if there are ``files``."""
        if self._files is not None:
            self._files.write([(k.tokens.tolist(), k, k.kind) for k in self._kept.values()])

    def fetch(self, tokens: list[int]) -> tuple[list | None, int]:
        """Copy the caches of the longest start of ``tokens[:-1]``; return them and that length."""
        cache, rest = self._lru.fetch_nearest_cache(MODEL, tokens[:-1])
        cached = len(tokens[:-1]) - len(rest)
        return (list(cache), cached) if cached else (None, 0)

    def keep(self, tokens: list[int], cache: list, kind: str = "assistant") -> None:
        """Keep a copy of the caches after ``tokens`` if there is memory; ``kind`` is mlx-lm's.

        The oldest prompt of one kind is forgotten if room is needed. This kind is assistant, or
        user if more user prompts are kept, or system if even more system prompts are kept.
        """
        cache = copy.deepcopy(cache)  # the copy shares arrays; the caller may go on writing
        # The caches of a text in a batch are views, which would keep all of the batch's arrays.
        for c in cache:
            c.state = tree_map(lambda a: mx.contiguous(a) if type(a) is mx.array else a, c.state)
        if self.make_way(sum(c.nbytes for c in cache)):  # make room before they are copied
            mx.eval([c.state for c in cache])
            kept = self._kept[next(self._numbers)] = _Kept(cache)
            kept.tokens, kept.kind = np.array(tokens), kind
            self._lru.insert_cache(MODEL, tokens, kept, cache_type=kind)

    def shared(self, tokens: list[int], cached: int) -> int:
        """Return how many tokens a prompt shares with an earlier prompt, and remember the prompt.

        Later prompts can use caches of that length. Returns 0 if ``cached`` is nearly as much.
        """
        prompt, known = np.array(tokens[:-1]), [kept.tokens for kept in self._kept.values()]
        shared = max((same(prompt, other) for other in [*known, *self._latest]), default=0)
        self._latest.append(prompt)
        return shared if shared >= cached + 16 else 0  # fewer tokens are cheaper to read again

    def trim(self, nbytes: int) -> None:
        """Forget prompts until ``nbytes`` of the limit are left for texts being written."""
        self._lru.trim_to(n_bytes=self._lru.max_bytes - nbytes)

    def make_way(self, nbytes: int = 0) -> bool:
        """Forget prompts until ``free_nbytes + nbytes`` are free; return False if that fails."""
        need = self._free_nbytes and self._free_nbytes + nbytes
        if not need or need <= memory_now()[1]:
            return True
        mx.clear_cache()  # perhaps the freed memory that MLX and the C library keep is enough
        return_free_memory()
        left = self._lru.nbytes - (need - memory_now()[1])
        if left < self._lru.nbytes:
            self._lru.trim_to(n_bytes=left)
            mx.clear_cache()
            return_free_memory()
        return left >= 0


def same(a: np.ndarray, b: np.ndarray) -> int:
    """Return how long the common beginning of two arrays is."""
    n = min(len(a), len(b))
    return int(np.argmin(np.append(a[:n] == b[:n], False)))

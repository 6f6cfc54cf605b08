"""Caches of earlier prompts and answers, kept for prompts that begin alike."""

import copy
import sys
from collections import deque

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import LRUPromptCache

from ...memory import return_free_memory
from ...streaming.plan import memory_now

MODEL = "model"  # LRUPromptCache has a key for the model, and a server has one model
MIN_SHARED = 16  # fewer tokens that prompts share are sooner read again than kept
LATEST = 16  # prompts whose tokens are remembered, to see where the next ones part from them


class Prompts:
    """Caches of earlier prompts and answers, at most ``size`` of at most ``nbytes`` together.

    Where less than ``free_nbytes`` of memory are free, prompts are forgotten; with 0, as on ranks
    (which must all keep the same), none is. One thread calls this.
    """

    def __init__(self, size: int = 10, nbytes: int = sys.maxsize, free_nbytes: int = 0):
        self._lru, self._free_nbytes = LRUPromptCache(size, nbytes), free_nbytes
        self._latest = deque(maxlen=LATEST)  # int arrays, of prompts and kept texts

    def fetch(self, tokens: list[int]) -> tuple[list | None, int]:
        """A copy of the caches that cover the most of a prompt's tokens, and how many they cover.

        The last token is left to read, since its logits choose the next one. (None, 0): read all.
        """
        cache, rest = self._lru.fetch_nearest_cache(MODEL, tokens[:-1])
        cached = len(tokens[:-1]) - len(rest)
        return (cache, cached) if cached else (None, 0)

    def keep(self, tokens: list[int], cache: list, kind: str = "assistant") -> None:
        """Keep a copy of the caches after ``tokens``, if there is memory for it.

        ``kind`` (assistant, user or system) says what is forgotten first: that of which most are
        kept, assistant before user before system.
        """
        cache = copy.deepcopy(cache)  # shares the arrays, and the caller's may go on
        # The caches of a text in a batch are views of the batch's arrays and would keep them all.
        for c in cache:
            c.state = tree_map(lambda a: mx.contiguous(a) if type(a) is mx.array else a, c.state)
        if self.make_way(sum(c.nbytes for c in cache)):  # before they are copied
            mx.eval([c.state for c in cache])
            self._lru.insert_cache(MODEL, tokens, cache, cache_type=kind)
            self._latest.append(np.array(tokens))

    def shared(self, tokens: list[int]) -> int:
        """How many tokens a prompt shares with a latest one; 0 if ``fetch`` covers them, or few.

        A state kept there serves the next prompt that begins so. Notes the prompt as read.
        """
        prompt = np.array(tokens[:-1])
        shared = max((_same(prompt, other) for other in self._latest), default=0)
        self._latest.append(prompt)
        return shared if shared >= MIN_SHARED and shared > self.fetch(tokens)[1] else 0

    def trim(self, nbytes: int) -> None:
        """Forget prompts until those that are kept take at most ``nbytes``."""
        self._lru.trim_to(n_bytes=nbytes)

    def make_way(self, nbytes: int = 0) -> bool:
        """Forget prompts until ``free_nbytes + nbytes`` are free; False if that fails."""
        short = self._free_nbytes + nbytes - memory_now()[1] if self._free_nbytes else 0
        enough = short <= self._lru.nbytes
        if short > 0:
            self.trim(self._lru.nbytes - short)
            mx.clear_cache()
            return_free_memory()
        return enough


def _same(a, b):
    """How many numbers two arrays begin with in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n

"""The protocol of drafts, which guess the target's next tokens, and two drafts without training."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..prompt import vocabulary
from .policy import MAX_DRAFTS, Policy
from .rollback import Rollback
from .target import PREFILL_STEP

Choose = Callable[[mx.array], mx.array]


class Draft(Protocol):
    """Guesses the target's next tokens. The guesses decide the speed. They change the text only
    if a pass over several positions rounds differently from a pass over one position.

    A draft serves one sequence, B = 1. A round has three steps: ``propose``; one pass of the target
    over ``[last, *proposed]``; ``extend`` with the pass's accepted tokens, ``last`` first. ``last``
    is the newest token: it is accepted, but not yet in the target's cache. In ``extend`` a draft
    also drops its state of refused guesses. A subclass inherits that it reads no layers and has
    no caches.
    """

    layer_ids: Sequence[int] = ()
    """Decoder layers of the target whose outputs the draft reads (0: the first); () for none."""

    cache: Sequence = ()
    """The draft's state as mlx-lm caches, which can be saved; () for none. Set by ``bind``."""

    verify_tokens: int = MAX_DRAFTS + 1
    """The most tokens of a verify pass; ``load(draft=)`` reserves memory for their states."""

    def make_cache(self) -> list:
        """Make caches for a new sequence, in the order of ``cache``; [] for none."""
        return []

    def read_zeros(self) -> list:
        """Return unevaluated caches of two tokens, from which ``load`` estimates longer caches."""
        return []

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        """Start a sequence for a target, or go on from the state in ``cache``.

        A ValueError says what does not fit the target: vocabulary, hidden size or layer ids.
        """

    def extend(self, tokens: mx.array, features: mx.array | None) -> None:
        """Note tokens ``[n]`` that the target has read: parts of the prompt, then a round's tokens.

        ``features`` ``[n, len(layer_ids) * D]`` are the outputs of the layers ``layer_ids`` for the
        tokens; None without ``layer_ids``. ``extend`` is called also while nothing is drafted:
        queue the tokens here, and compute in ``propose``.
        """

    def propose(self, last: int, n: int, choose: Choose) -> mx.array:
        """Guess at most ``n`` tokens that follow ``last``: uint32 ``[<= n]``.

        If n = 0, the draft only brings ``cache`` up to date: it reads the tokens of ``extend``, but
        not ``last``. ``choose`` turns logits ``[k, V]`` into tokens ``[k]``, lazily, with the
        caller's sampler and the random numbers that the target will draw at the same positions.
        Call ``choose`` for the positions in order, one row or several at a time.
        """


class ModelDraft(Draft):
    """A small mlx-lm model as a draft. It is in memory and has the target's tokenizer.

    Args:
        model (nn.Module): As ``mlx_lm.load`` or ``moelab.load`` returns it. It computes with the
            kernels that it was loaded with.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    def make_cache(self) -> list:
        return make_prompt_cache(self.model)

    def read_zeros(self) -> list:
        self.model(mx.zeros((1, 2), mx.int32), cache=(caches := self.make_cache()))
        return caches

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        own, target = vocabulary(self.model), vocabulary(model)
        if own != target:
            raise ValueError(
                f"draft: expected the target's vocabulary of {target} tokens, got {own}. Draft and "
                "target must share a tokenizer."
            )
        self.cache = cache or self.make_cache()
        self._rollback = Rollback(self.model, self.cache)
        self._unread = []  # tokens that the target has read and this model has not
        self._guessed = 0  # tokens that this model has read and the target may refuse

    def extend(self, tokens: mx.array, features: mx.array | None = None) -> None:
        if self._guessed > tokens.size:
            self._rollback.undo(self._guessed - tokens.size)
        self._unread.append(tokens[self._guessed :])
        self._guessed = 0

    def propose(self, last: int, n: int, choose: Choose) -> mx.array:
        self._rollback.commit()
        x = mx.concatenate([*self._unread, mx.array([last] if n else [], mx.uint32)])
        self._unread = []
        while x.size > PREFILL_STEP or (n == 0 and x.size):
            self.model(x[None, :PREFILL_STEP], cache=self.cache)
            mx.eval([c.state for c in self.cache])
            x = x[PREFILL_STEP:]
        guesses = []
        for _ in range(n):
            x = choose(self._rollback(x[None])[:, -1])
            mx.async_eval(x)
            guesses.append(x)
        self._guessed = n
        return mx.concatenate(guesses) if guesses else mx.array([], mx.uint32)


class TokenCache:
    """The cache of ``LookupDraft``: the tokens of the text so far."""

    state = ()  # no arrays

    def __init__(self):
        self.tokens: list[int] = []

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(n, len(self.tokens))
        del self.tokens[len(self.tokens) - n :]
        return n


class LookupDraft(Draft):
    """Prompt lookup (Saxena 2023): proposes what followed an earlier occurrence of the last tokens.

    It needs no model, and is good where text repeats itself. It takes the longest of the latest 16
    matches, and the latest of equally long matches. It proposes at most half as many tokens as the
    match has: a longer match is likely to go on for longer. For the methods see ``Draft``.
    """

    _SHORTEST = 4  # tokens that must match
    _OCCURRENCES = 16  # the latest matches that are compared

    def make_cache(self) -> list:
        return [TokenCache()]

    def bind(self, model: nn.Module, cache: list | None = None) -> None:
        self.cache = cache or self.make_cache()
        earlier, self.cache[0].tokens = self.cache[0].tokens, []
        self._tokens, self._unread = self.cache[0].tokens, [mx.array(earlier, mx.uint32)]
        self._ends = {}  # ``_SHORTEST`` tokens -> where their latest occurrences end, latest first

    def extend(self, tokens: mx.array, features: mx.array | None = None) -> None:
        self._unread.append(tokens)

    def propose(self, last: int, n: int, choose: Choose) -> mx.array:
        self._read()
        text = self._tokens
        text.append(last)
        longest, at = 0, 0
        for end in self._ends.get(tuple(text[-self._SHORTEST :]), ()):
            k = self._SHORTEST
            while k < min(2 * n, end) and text[end - 1 - k] == text[-1 - k]:
                k += 1
            if k > longest:
                longest, at = k, end
        guesses = text[at : at + min(n, longest // 2)]
        text.pop()
        return mx.array(guesses, mx.uint32)

    def _read(self):
        for token in (t for x in self._unread for t in x.tolist()):
            if len(self._tokens) >= self._SHORTEST:
                key = tuple(self._tokens[-self._SHORTEST :])
                ends = self._ends.setdefault(key, deque(maxlen=self._OCCURRENCES))
                ends.appendleft(len(self._tokens))
            self._tokens.append(token)
        self._unread = []


def learned_policy(model: nn.Module, draft: Draft) -> Policy:
    """Return the policy of this target and draft, which goes on learning in later texts."""
    target, policy = vars(draft).get("_learned", (lambda: None, None))
    if target() is not model:
        policy = Policy()
        vars(draft)["_learned"] = weakref.ref(model), policy
    return policy


class BoundDraft:
    """A draft that one generation has bound to its target, until another generation binds it."""

    def __init__(self, draft: Draft, model: nn.Module, cache: list | None = None):
        draft.bind(model, cache)
        self._draft, self._vocabulary = draft, vocabulary(model)
        vars(draft)["_bound"] = weakref.ref(self)

    @property
    def is_bound(self) -> bool:
        """Whether no later generation has bound the draft."""
        return vars(self._draft)["_bound"]() is self

    def extend(self, tokens: mx.array, features: mx.array | None) -> None:
        """Tell the draft what the target has read, unless another generation bound the draft."""
        if self.is_bound:
            self._draft.extend(tokens, features)

    def catch_up(self) -> list:
        """Let the draft read all tokens that it was told of; return the draft's cache."""
        self.propose(0, 0, None)
        return self._draft.cache

    def propose(self, last: int, n: int, choose: Choose | None) -> list[int]:
        """Guess at most ``n`` tokens, up to the first one outside the target's vocabulary."""
        if not self.is_bound:
            raise ValueError(
                "draft: another generation has begun with this draft, which keeps the state of one "
                "text. Give each generation that runs at the same time a draft of its own."
            )
        guesses = self._draft.propose(last, n, choose)[:n].tolist()
        wrong = (i for i, guess in enumerate(guesses) if not 0 <= guess < self._vocabulary)
        return guesses[: next(wrong, None)]

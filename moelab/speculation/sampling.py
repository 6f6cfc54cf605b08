"""Chooses the target's tokens, and counts the guesses that agree with them.

The target chooses every token. Each position has its own random numbers, which the draft and the
target share. So the draft and the target choose the same token if their distributions are equal,
with any sampler (Daliri et al., 2408.07978).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler


def num_accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Count the leading drafts that equal the target's choices."""
    pairs = enumerate(zip(drafts, chosen))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafts), len(chosen)))


class Chooser:
    """Applies processors and a sampler to logits; processors get all accepted ``tokens``."""

    def __init__(self, sampler: Callable | None, processors: list | None, tokens: mx.array):
        self._sampler, self._processors = sampler or greedy_sampler, processors or []
        self._random = self._sampler is not greedy_sampler
        self._tokens = tokens
        self._keys = []  # the state of mx.random after each row of the last call

    def __call__(
        self, logits: mx.array, drafts: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Give the target's tokens ``[k]`` and log probabilities ``[k, V]`` for logits ``[k, V]``.

        Row i of the logits comes after the first i tokens of ``drafts`` ``[k - 1]``.
        """
        self._keys = []
        return self._rows(logits, lambda i: drafts[:i] if i else None)

    @contextmanager
    def drafting(self) -> Iterator[Callable[[mx.array], mx.array]]:
        """Yield a draft's ``choose``; the target draws the same random numbers again later."""
        before, chosen = mx.random.state[0], []

        def choose(logits):
            for i in range(logits.shape[0]):
                y, _ = self._rows(
                    logits[i : i + 1], lambda _: mx.concatenate(chosen) if chosen else None
                )
                chosen.append(y)
            return mx.concatenate(chosen[-logits.shape[0] :])

        yield choose if self._random or self._processors else greedy_sampler
        if self._random:
            set_state(before)

    def commit(self, tokens: mx.array) -> None:
        """Accept ``tokens``, the first ones that the last call chose."""
        if self._processors:
            self._tokens = mx.concatenate([self._tokens, tokens])
        if self._random and tokens.size < len(self._keys):
            set_state(self._keys[tokens.size - 1])

    def _rows(self, logits, following):
        if not self._random and not self._processors:
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            return greedy_sampler(logprobs), logprobs
        tokens, logprobs = [], []
        for i in range(logits.shape[0]):
            row = logits[i : i + 1]
            if self._processors:
                more = following(i)
                context = self._tokens if more is None else mx.concatenate([self._tokens, more])
                for processor in self._processors:
                    row = processor(context, row)
            logprobs.append(row - mx.logsumexp(row, axis=-1, keepdims=True))
            tokens.append(self._sampler(logprobs[-1]))
            self._keys.append(mx.random.state[0])
        return mx.concatenate(tokens), mx.concatenate(logprobs)


def set_state(key: mx.array) -> None:
    """Let mx.random go on from ``key`` [2], a former ``mx.random.state[0]``."""
    # The state cannot be assigned. Seeding with the key's two 32-bit halves gives the same state.
    high, low = key.tolist()
    mx.random.seed(high << 32 | low)

"""Greedy decoding against the clock: the one loop that every experiment times."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from .. import stats
from ..prompt import encode as encode
from ..streaming.session import Counters, is_loaded, session_of


@dataclass(frozen=True)
class Decoded:
    """One greedy run against the clock; ``records.Sample`` has the same fields and its round.

    Attributes:
        tokens (list[int]): All that it decoded: the prompt's next token, the warm-up and the timed
            ones.
        prefill_s (float): Seconds of the prompt, its next token included.
        decode_s (float): Seconds of the timed tokens together.
        step_s (list[float]): Seconds of each timed token.
        counters (Counters or None): Of the timed tokens; None for a model that ``moelab.load`` did
            not return.
        prompt_nbytes (int or None): Bytes read for the prompt.
    """

    tokens: list[int]
    prefill_s: float
    decode_s: float
    step_s: list[float]
    counters: Counters | None
    prompt_nbytes: int | None = None


def same_tokens(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens from the first on are the same in two texts."""
    pairs = enumerate(zip(tokens, others))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def decode(
    model: nn.Module,
    prompt_ids: Sequence[int],
    tokens: int,
    warmup: int = 0,
    before_clock: Callable[[], Any] | None = None,
    feed: Sequence[int] | None = None,
    before_token: Callable[[], Any] | None = None,
    before_prompt: Callable[[], Any] | None = None,
) -> Decoded:
    """Greedy tokens and the seconds they took, prompt and decoding apart.

    The prompt but for its last token is read first, and its logits are not used. The next token
    is scheduled before this one is read, as in mlx-lm's ``generate_step``. But the
    clock starts and stops with nothing scheduled, so that it times exactly ``tokens`` passes.

    Args:
        model (nn.Module): From ``moelab.load`` or ``mlx_lm.load``.
        prompt_ids (Sequence[int]): The prompt.
        tokens (int): How many tokens to time.
        warmup (int): Tokens decoded before the clock starts.
        before_clock (Callable): Called just before it starts, to drop the page cache.
        feed (Sequence[int]): ``warmup + tokens`` ids to feed in place of the greedy tokens, which
            are returned all the same.
        before_token (Callable): Called before every token with the clock stopped; then each token
            is read before the next is scheduled.
        before_prompt (Callable): Called before the prompt, to drop the page cache.
    """
    cache, ids = make_prompt_cache(model), mx.array(prompt_ids)[None]
    with mx.stream(generation_stream):

        def step(ids):
            return mx.argmax(model(ids[None], cache=cache)[:, -1, :], axis=-1)

        fed = None if feed is None else iter(feed)

        def scheduled(y):
            y = step(y if fed is None else mx.array([next(fed)]))
            mx.async_eval(y)
            return y

        def run(y, n):
            out, took_s, following = [], [], None
            begin = time.perf_counter()
            for i in range(n):
                if before_token:
                    before_token()
                    begin = time.perf_counter()
                y = scheduled(y) if following is None else following
                following = scheduled(y) if i + 1 < n and not before_token else None
                out.append(y.item())
                end = time.perf_counter()
                took_s.append(end - begin)
                begin = end
            return y, out, np.array(took_s)

        ours = is_loaded(model)
        if ours:
            stats(model, reset=True)
        if before_prompt:
            before_prompt()
        begin = time.perf_counter()
        if ids.shape[1] > 1:  # as mlx-lm does: the last token by itself
            before = ids[:, :-1]
            for part in session_of(model).room.parts(before) if is_loaded(model) else [before]:
                model(part, cache=cache)
                mx.eval([c.state for c in cache])
        y = step(ids[0, -1:])
        first = y.item()
        prefill_s = time.perf_counter() - begin
        prompt_nbytes = stats(model).prefill.bytes_read if ours else None
        y, warm, _ = run(y, warmup)
        if ours:
            stats(model, reset=True)
        if before_clock:
            before_clock()
        y, out, step_s = run(y, tokens)
    return Decoded(
        tokens=[first, *warm, *out],
        prefill_s=prefill_s,
        decode_s=float(step_s.sum()),
        step_s=step_s.round(7).tolist(),
        counters=stats(model).decode if ours else None,
        prompt_nbytes=prompt_nbytes,
    )

"""Greedy decoding against the clock: the one loop that every experiment times."""

import dataclasses
import time

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from .. import stats


def encode(tokenizer, prompt):
    """The tokens of a prompt, of which there must be some."""
    ids = tokenizer.encode(prompt)
    if not len(ids):
        raise ValueError(
            f"prompt {prompt!r}: expected a text of at least one token, the tokenizer made none. Give another."
        )
    return ids


def decode(model, prompt_ids, tokens, warmup=0, before_clock=None):
    """Greedy tokens and the seconds they took, prompt and decoding apart.

    The next token is scheduled before this one is read, as in mlx-lm's ``generate_step``; but the clock starts and
    stops with nothing in flight, so that every mode is charged for exactly ``tokens`` passes.

    Args:
        model (nn.Module): From ``moelab.load`` or ``mlx_lm.load``.
        prompt_ids (list[int]): The prompt.
        tokens (int): How many tokens to time.
        warmup (int): Tokens decoded before the clock starts.
        before_clock (Callable): Called just before it starts, to drop the page cache.

    Returns:
        dict: ``tokens`` (all of them), ``prefill_s``, ``decode_s``, ``step_s`` (of each token) and ``counters`` of the timed part (None
        for a model that is not ours).
    """
    cache = make_prompt_cache(model)
    with mx.stream(generation_stream):

        def step(ids):
            return mx.argmax(model(ids[None], cache=cache)[:, -1, :], axis=-1)

        def run(y, n):
            out = []
            if n:
                y = step(y)
                mx.async_eval(y)
            for i in range(n):
                following = None
                if i + 1 < n:
                    following = step(y)
                    mx.async_eval(following)
                out.append(y.item())
                ends.append(time.perf_counter())
                if following is not None:
                    y = following
            return y, out

        ends = [time.perf_counter()]
        y = step(mx.array(prompt_ids))
        first = y.item()
        prefill_s = time.perf_counter() - ends[0]
        y, warm = run(y, warmup)
        ours = hasattr(model, "_session")
        if ours:
            stats(model, reset=True)
        if before_clock:
            before_clock()
        ends = [time.perf_counter()]
        y, out = run(y, tokens)
        step_s = np.diff(ends)
    counters = None
    if ours:
        c = stats(model).decode
        counters = {
            **dataclasses.asdict(c),
            "hit_rate": c.hit_rate,
            "bytes_per_token": c.bytes_per_token,
        }
    return {
        "tokens": [first, *warm, *out], "prefill_s": prefill_s, "decode_s": float(step_s.sum()),
        "step_s": step_s.round(7).tolist(), "counters": counters,
    }  # fmt: skip

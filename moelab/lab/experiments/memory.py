"""Does a model's memory stay what ``footprint`` predicts while it writes a long text?"""

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, footprint, load
from ...streaming.session import session_of
from .. import machine
from ..models import folder
from ..texts import PROMPTS


def measure(
    path: str | Path,
    config: StreamConfig,
    tokens: int = 256,
    every: int = 32,
    prompt: str = PROMPTS[0],
) -> dict[str, Any]:
    """Memory of one long greedy run, counted every few tokens.

    Args:
        path (str or Path): The model.
        config (StreamConfig): How to stream.
        tokens (int): Decoded.
        every (int): Tokens from one count to the next.
        prompt (str): Before them.

    Returns:
        dict: ``tokens``, ``active_nbytes``, ``peak_nbytes`` (MLX's own count) and ``rss_nbytes`` at
        every count, and ``predicted_nbytes``.
    """
    path = folder(path)
    before = mx.get_active_memory()
    model, tokenizer = load(path, config)
    out = {
        "kind": "memory",
        "machine": machine.card(),
        "config": dataclasses.asdict(session_of(model).config),
        "tokens": [],
        "active_nbytes": [],
        "peak_nbytes": [],
        "rss_nbytes": [],
    }
    out["predicted_nbytes"] = footprint(path, session_of(model).config).total_nbytes
    with model:
        cache = make_prompt_cache(model)
        y = mx.argmax(model(mx.array([tokenizer.encode(prompt)]), cache=cache)[:, -1], axis=-1)
        mx.eval(y)
        for i in range(tokens + 1):
            if i % every == 0:
                out["tokens"].append(i)
                out["active_nbytes"].append(mx.get_active_memory() - before)
                out["peak_nbytes"].append(mx.get_peak_memory() - before)
                out["rss_nbytes"].append(psutil.Process().memory_info().rss)
                mx.reset_peak_memory()
            y = mx.argmax(model(y[None], cache=cache)[:, -1], axis=-1)
            mx.eval(y)
    return out

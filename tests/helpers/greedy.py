"""Greedy decoding for tests that compare logits."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache


def greedy_logits(model: nn.Module, prompt: list[int], steps: int) -> np.ndarray:
    """Logits ``[steps + 1, V]`` of a prompt's last token and of the greedy tokens after it."""
    cache, tokens, rows = make_prompt_cache(model), prompt, []
    for _ in range(steps + 1):
        rows.append(np.array(model(mx.array([tokens]), cache=cache)[0, -1].astype(mx.float32)))
        tokens = [int(rows[-1].argmax())]
    return np.stack(rows)

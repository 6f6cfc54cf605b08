"""What many tests use: a model, prompts, greedy decoding, how near arrays are, what slots hold."""

import os

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from moelab import DATA, kernels
from moelab.streaming.session import session_of

TINY_MOE = DATA / "models" / "tiny-moe"
STREAMED = ("serial", "buffers", "stacked", "fused")
PROMPT = [5, 36, 67, 2, 33, 64, 95, 30, 61]
LONG = [(31 * i + 5) % 96 for i in range(590)]
GB, MB = 10**9, 10**6
FAST = os.environ.get("MOELAB_FAST") == "1"
needs_kernels = pytest.mark.skipif(
    not kernels.available(), reason="the fast kernels need llvmlite and the CPU backend"
)


def greedy_logits(model: nn.Module, prompt: list[int], steps: int) -> np.ndarray:
    """Logits ``[steps + 1, V]`` of a prompt's last token and of the greedy tokens after it."""
    cache, tokens, rows = make_prompt_cache(model), prompt, []
    for _ in range(steps + 1):
        rows.append(np.array(model(mx.array([tokens]), cache=cache)[0, -1].astype(mx.float32)))
        tokens = [int(rows[-1].argmax())]
    return np.stack(rows)


def near(got, want, bound: float = 1e-5) -> bool:
    """Whether they differ by at most ``bound`` times the largest number of ``want``."""
    got, want = np.array(got, np.float64), np.array(want, np.float64)
    return got.shape == want.shape and np.abs(got - want).max() <= bound * np.abs(want).max()


def assert_every_slot_is_there(model: nn.Module) -> None:
    """Each slot holds one expert, is free or is reserved for a read ahead."""
    for layer in session_of(model).layers:
        table, ahead = layer.slots.table, layer.slots.ahead
        reserved = [slot for g in ahead for slot in (g.slots | g.others).values()]
        every = [*table.slot_of.values(), *table._free, *reserved]
        assert sorted(every) == list(range(table.num_slots)), layer.path

"""What many tests use: models, prompts, greedy decoding, checks of numbers, slots, page cache."""

import ctypes
import json
import mmap
import os
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from moelab import DATA, StreamConfig, kernels
from moelab import synthesize as S
from moelab.lab.arguments import Evicting
from moelab.streaming.model import load_model
from moelab.streaming.session import session_of

TINY_MOE = DATA / "models" / "tiny-moe"
STREAMED = ("serial", "buffers", "stacked", "fused")
PROMPT = [5, 36, 67, 2, 33, 64, 95, 30, 61]
LONG = [(31 * i + 5) % 96 for i in range(590)]
GB, MB = 10**9, 10**6
FAST = os.environ.get("MOELAB_FAST") == "1"


def tries(n: int, **settings):
    """Hypothesis's settings: ``n`` examples, a quarter of them in ``make test``."""
    import hypothesis  # imported here: ranks import this file without hypothesis

    return hypothesis.settings(max_examples=n // 4 if FAST else n, **settings)


needs_kernels = pytest.mark.skipif(
    not kernels.available(), reason="the fast kernels need llvmlite and the CPU backend"
)


def loaded(path: Path, **fields) -> nn.Module:
    """A model without its tokenizer; ``fields`` are those of its configuration."""
    config = Evicting if "policy" in fields else StreamConfig
    return load_model(path, config(**fields))[0]


def greedy_logits(model: nn.Module, prompt: list[int], steps: int, every=False) -> np.ndarray:
    """Logits of a prompt's last token (or of all, if ``every``) and of the greedy tokens after."""
    cache, tokens, rows = make_prompt_cache(model), prompt, []
    for _ in range(steps + 1):
        logits = model(mx.array([tokens]), cache=cache)[0]
        rows.append(np.array((logits if every else logits[-1:]).astype(mx.float32)))
        tokens = [int(rows[-1][-1].argmax())]
    return np.concatenate(rows)


def in_passes(model: nn.Module, tokens: mx.array, step: int) -> mx.array:
    """Logits of tokens ``[B, T]``; each call reads ``step`` tokens of every row."""
    cache = make_prompt_cache(model)
    parts = [model(tokens[:, i : i + step], cache=cache) for i in range(0, tokens.shape[1], step)]
    return mx.concatenate(parts, axis=1)


def watched(patch: pytest.MonkeyPatch, owner, name: str, note=lambda *args: args) -> list:
    """Return a list that gets the arguments of a function's calls; the function still works."""
    seen, real = [], getattr(owner, name)

    def call(*args, **kwargs):
        seen.append(note(*args, **kwargs))
        return real(*args, **kwargs)

    patch.setattr(owner, name, call)
    return seen


def near(got, want, bound: float = 1e-5) -> bool:
    """Whether ``got`` differs by at most ``bound`` times the largest number of ``want``."""
    got, want = np.array(got, np.float64), np.array(want, np.float64)
    return got.shape == want.shape and np.abs(got - want).max() <= bound * np.abs(want).max()


def close(got, want) -> bool:
    """Whether logits differ from ``want`` by at most 2e-4 of their standard deviation."""
    return np.abs(got - want).max() <= 2e-4 * want.std()


def assert_every_slot_is_there(model: nn.Module) -> None:
    """Each slot holds one expert, is free or is reserved for a read ahead."""
    for layer in session_of(model).layers:
        table, ahead = layer.slots.table, layer.slots.ahead
        reserved = [slot for g in ahead for slot in (g.slots | g.others).values()]
        every = [*table.slot_of.values(), *table._free, *reserved]
        assert sorted(every) == list(range(table.num_slots)), layer.path


def small(like="qwen3.5-35b-a3b"):
    """The configuration ``like``, made small enough for a test."""
    config = json.loads(json.dumps(S.CONFIGS[like]))
    config.get("text_config", config).update(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=64,
        num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip
    if "rope_parameters" in config.get("text_config", {}):
        config["text_config"]["rope_parameters"]["mrope_section"] = [3, 3, 2]
    return config


def cached_nbytes(path: Path) -> int | None:
    """Cached bytes of a file, or of a model's tensors; None if ``mincore`` cannot tell us."""
    mincore, cached = getattr(ctypes.CDLL(None), "mincore", None), 0
    for file in path.glob("*.safetensors") if path.is_dir() else [path]:
        size, is_own = os.path.getsize(file), os.stat(file).st_uid == os.geteuid()
        if mincore is None or not size or not (is_own or os.access(file, os.W_OK)):
            return None
        with open(file, "rb") as f:
            mapped = np.frombuffer(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        if mincore(*map(ctypes.c_void_p, (mapped.ctypes.data, size, pages.ctypes.data))):
            return None
        cached += min(size, int((pages & 1).sum()) * mmap.PAGESIZE)
    return cached

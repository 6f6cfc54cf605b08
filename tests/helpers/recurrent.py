"""Small models of every recurrent family, and the comparison of their caches."""

import importlib
from functools import cache as once
from pathlib import Path

import families
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from common import tries
from hypothesis import Phase
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

import moelab
from moelab.speculation import rollback
from moelab.speculation.rollback import Rollback

TINY = Path(__file__).parents[2] / "data" / "models" / "tiny-moe"
TOLERANCE = 1e-5
V = families.VOCAB
# Without Phase.shrink, which takes minutes.
FEW = tries(40, derandomize=True, phases=(Phase.explicit, Phase.generate))

# The recurrent families of mlx-lm that have no experts: what they need beyond families.COMMON.
DENSE = {
    "mamba": dict(state_size=8, use_bias=False, time_step_rank=4),
    "mamba2": dict(state_size=16, n_groups=1, use_bias=False, tie_word_embeddings=True,
                   time_step_limit=(0.001, 100.0), time_step_rank=4),
    "falcon_h1": dict(mamba_d_head=16, mamba_d_ssm=64),
    "plamo2": dict(hidden_size_per_head=16),
    "olmo_hybrid": dict(linear_allow_neg_eigval=True, linear_num_value_heads=2,
                        layer_types=["linear_attention", "full_attention"]),
    "lfm2": dict(conv_bias=False, block_dim=64, block_multiple_of=16, block_ffn_dim_multiplier=1.0,
                 block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]),
    "recurrent_gemma": dict(num_key_value_heads=1, conv1d_width=4, logits_soft_cap=30.0,
                            attention_window_size=8, block_types=["recurrent", "attention"]),
    "rwkv7": dict(a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8),
    "baichuan_m1": dict(sliding_window_layers=[1], conv_window=2),
    "gear": dict(layer_types=["conv_mixer", "full_attention"], sliding_window=512,
                 final_logit_softcapping=None),
}  # fmt: skip
WITH_EXPERTS = ["bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "granitemoehybrid"]
WITH_EXPERTS += ["jamba", "kimi_k3", "kimi_linear", "lfm2_moe", "longcat_flash_ngram"]
WITH_EXPERTS += ["nemotron_h", "qwen3_5_moe", "qwen3_next"]
ONLY_RESTORED = {"longcat_flash_ngram", "recurrent_gemma", "rwkv7", "baichuan_m1"}


@once
def build(name):
    """A small random model whose state depends on every token."""
    if name not in DENSE:
        return families.build(name)[0]
    mx.random.seed(1)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name, **families.COMMON, **DENSE[name]}
    model = module.Model(module.ModelArgs.from_dict(config))
    disturbed = nn.utils.tree_map(
        lambda p: p + 0.1 * mx.random.normal(p.shape) if p.ndim == 1 else p, model.parameters()
    )
    mx.eval(model.update(disturbed).parameters())
    return model


@once
def with_wide_heads():
    """A hybrid with heads of 32, the least that quantized caches take."""
    config = families.FAMILIES["qwen3_5_moe"].build_config("qwen3_5_moe")
    config["text_config"]["head_dim"] = 32
    mx.random.seed(2)
    module = importlib.import_module("mlx_lm.models.qwen3_5_moe")
    return module.Model(module.ModelArgs.from_dict(config))


@once
def tiny():
    return moelab.load(TINY, moelab.StreamConfig(mode="resident"))[0]


def ids(seed, n, batch=1, vocab=V):
    """Random token ids [batch, n]."""
    return mx.array(np.random.default_rng(seed).integers(0, vocab, (batch, n)), mx.uint32)


def seen(c):
    """The arrays of a cache that the next token depends on."""
    if isinstance(c, ArraysCache):
        return list(c.cache)
    if c.keys is None or (isinstance(c.offset, int) and c.offset == 0):
        return []
    if isinstance(c, RotatingKVCache):
        n = min(c.offset, c.max_size - 1)
        keys, values = (
            c._temporal_order(x) if c.offset >= c.max_size else x[..., : c._idx, :]
            for x in (c.keys, c.values)
        )
        return [x[..., x.shape[2] - n :, :] for x in (keys, values)]
    if hasattr(c, "keys_and_values"):
        pair = c.keys_and_values()
        return [a for x in pair for a in (x if isinstance(x, (tuple, list)) else [x])]
    return [c.keys[..., : c._idx, :], c.values[..., : c._idx, :]]


def difference(cache, other):
    """The largest difference between two prompt caches, which must have the same form."""
    worst = 0.0
    pairs = list(zip(rollback.leaves(cache), rollback.leaves(other), strict=True))
    for c, o in pairs:
        assert type(c) is type(o)
        if hasattr(c, "offset"):
            assert np.array_equal(np.array(c.offset), np.array(o.offset))
        for a, b in zip(seen(c), seen(o), strict=True):
            if a is None or b is None:
                assert a is b
                continue
            assert a.shape == b.shape and a.dtype == b.dtype
            worst = max(worst, mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item())
    return worst


def one_by_one(model, cache, tokens):
    """Decode tokens [B, T], each in a pass of its own."""
    for t in range(tokens.shape[1]):
        mx.eval(model(tokens[:, t : t + 1], cache=cache))


def play(model, cache, reference, rounds, strategy, seed=0, batch=1, vocab=V):
    """The largest difference of ``Rollback`` to plain decoding, in rounds (tokens read, kept)."""
    r = Rollback(model, cache, strategy)
    tokens, i, worst = ids(seed, sum(m for m, _ in rounds), batch, vocab), 0, 0.0
    for m, keep in rounds:
        mx.eval(r(tokens[:, i : i + m]))
        r.undo(m - keep)
        r.commit()
        one_by_one(model, reference, tokens[:, i : i + keep])
        i += keep
        worst = max(worst, difference(cache, reference))
    return worst


def start(model, prompt, **kwargs):
    """A cache that has read a prompt [B, T]."""
    cache = make_prompt_cache(model, **kwargs)
    if prompt.shape[1]:
        mx.eval(model(prompt, cache=cache))
    return cache


ROUNDS = [(6, 3), (6, 6), (4, 1), (9, 8), (1, 1), (3, 0), (1, 0), (16, 2), (2, 1)]

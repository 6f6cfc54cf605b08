"""Small recurrent models, drafts that need no model, and texts and caches to compare."""

import importlib
from functools import cache as once

import families
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

import moelab
from moelab.lab.texts import heldout_prompts
from moelab.speculation import rollback
from moelab.speculation.drafts import Draft
from moelab.speculation.generate import speculative_generate_step

MODELS = moelab.DATA / "models"
PROMPT = [5, 17, 3, 80, 41, 2, 17]
V = families.VOCAB

# Config keys of mlx-lm's recurrent families without experts, besides those of families.COMMON.
DENSE = {
    "mamba": dict(state_size=8, use_bias=False, time_step_rank=4),
    "mamba2": dict(state_size=32, n_groups=1, use_bias=False, tie_word_embeddings=True,
                   time_step_limit=(0.001, 100.0), time_step_rank=4),
    "falcon_h1": dict(mamba_d_head=16, mamba_d_ssm=64),
    "plamo2": dict(hidden_size_per_head=16),
    "olmo_hybrid": dict(linear_allow_neg_eigval=True, linear_num_value_heads=2,
                        layer_types=["linear_attention", "full_attention"]),
    "lfm2": dict(conv_bias=False, block_dim=64, block_multiple_of=16, block_ffn_dim_multiplier=1.0,
                 block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]),
    "recurrent_gemma": dict(num_key_value_heads=1, conv1d_width=4, logits_soft_cap=30.0,
                            attention_window_size=8, block_types=["recurrent", "attention"]),
    "rwkv7": dict(head_dim=32, a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8,
                  decay_low_rank_dim=8),
    "baichuan_m1": dict(sliding_window_layers=[1], conv_window=2),
    "gear": dict(layer_types=["conv_mixer", "full_attention"], sliding_window=512,
                 final_logit_softcapping=None),
}  # fmt: skip


@once
def build(name, **changes):
    """A small random model whose state depends on every token; ``changes`` go into its config."""
    if name not in DENSE:
        return families.build(name, **changes)[0]
    mx.random.seed(1)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name, **families.COMMON, **DENSE[name]}
    model = module.Model(module.ModelArgs.from_dict(config))
    disturbed = tree_map(
        lambda p: p + 0.1 * mx.random.normal(p.shape) if p.ndim == 1 else p, model.parameters()
    )
    mx.eval(model.update(disturbed).parameters())
    return model


def ids(seed, n, batch=1, vocab=V):
    """Random token ids [batch, n]."""
    return mx.array(np.random.default_rng(seed).integers(0, vocab, (batch, n)), mx.uint32)


def seen(c):
    """Those arrays of a cache on which the next token depends."""
    if isinstance(c, ArraysCache):
        return list(c.cache)
    if c.keys is None or (isinstance(c.offset, int) and c.offset == 0):
        return []
    if isinstance(c, RotatingKVCache):
        n = min(c.offset, c.max_size - 1)
        return [c._temporal_order(x)[..., -n:, :] for x in (c.keys, c.values)]
    if hasattr(c, "keys_and_values"):
        return [a for _, a in tree_flatten(c.keys_and_values())]
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
            apart = mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()
            worst = np.maximum(worst, apart)  # NaN stays
    return worst


class Guess(Draft):
    """A draft without a model: proposes ``guess(tokens so far, n, choose)``."""

    def __init__(self, guess):
        self.guess = guess

    def bind(self, model, cache=None):
        self.tokens = []

    def extend(self, tokens, features):
        assert features is None
        self.tokens += tokens.tolist()

    def propose(self, last, n, choose):
        return mx.array(self.guess([*self.tokens, last], n, choose) if n else [], mx.uint32)


def repeat(tokens, n, choose):
    """Guess the tokens that followed the last token where it occurred before."""
    last = tokens[-1]
    found = next((i for i in range(len(tokens) - 2, -1, -1) if tokens[i] == last), None)
    return [] if found is None else tokens[found + 1 : found + 1 + n]


def told(plain):
    """Guess two tokens of the text ``plain``, then a wrong token, so that each block is cut."""

    def guess(tokens, n, choose):
        following = plain[len(tokens) :][:n]
        return following[:2] + [(t + 1) % V for t in following[2:3]] + following[3:]

    return guess


def steps(model, prompt, draft, n=4, max_tokens=40, **kwargs):
    """All that ``speculative_generate_step`` yields."""
    kwargs |= dict(num_draft_tokens=n, max_tokens=max_tokens)
    return list(speculative_generate_step(mx.array(prompt), model, draft, **kwargs))


def plain(model, prompt, max_tokens=40, **kwargs):
    """The tokens that mlx-lm generates without a draft."""
    return [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens, **kwargs)]


@once
def trained(mode="resident", kernels="auto", slots=16):
    """tiny-moe, loaded once for each choice of arguments."""
    return moelab.load(MODELS / "tiny-moe", moelab.StreamConfig(mode, slots, kernels=kernels))[0]


@once
def texts(num, length=64):
    """Prompts of held-out code and docstrings in turn."""
    kinds = (heldout_prompts(MODELS / "tiny-moe", kind, length) for kind in ("code", "prose"))
    return [ids for both in zip(*(p[::10][: num // 2] for p in kinds)) for ids in both]

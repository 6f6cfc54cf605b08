"""Drafts that need no model, and texts to compare."""

from functools import cache as once

import mlx.core as mx
from mlx_lm.generate import generate_step
from recurrent import V

import moelab
from moelab.lab.texts import heldout_prompts
from moelab.speculation.generate import speculative_generate_step

MODELS = moelab.DATA / "models"


class Guess:
    """A draft without a model: proposes ``guess(tokens so far, n, choose)``."""

    layer_ids = ()

    def __init__(self, guess):
        self.guess, self.cache = guess, []

    def make_cache(self):
        return []

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
    """Given the text ``plain``, guess two right tokens, then a wrong one: every block is cut."""

    def guess(tokens, n, choose):
        following = plain[len(tokens) :][:n]
        return following[:2] + [(t + 1) % V for t in following[2:3]] + following[3:]

    return guess


def steps(model, prompt, draft, n=4, max_tokens=40, **kwargs):
    """All that ``speculative_generate_step`` yields."""
    return list(
        speculative_generate_step(
            mx.array(prompt), model, draft, num_draft_tokens=n, max_tokens=max_tokens, **kwargs
        )
    )


def plain(model, prompt, max_tokens=40, **kwargs):
    """The tokens that mlx-lm generates without a draft."""
    return [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens, **kwargs)]


@once
def trained(mode="resident", kernels="mlx", slots=16):
    """tiny-moe, loaded once for each choice of arguments."""
    return moelab.load(MODELS / "tiny-moe", moelab.StreamConfig(mode, slots, kernels=kernels))[0]


@once
def texts(num, length=64):
    """Prompts of held-out code and docstrings in turn."""
    kinds = (heldout_prompts(MODELS / "tiny-moe", kind, length) for kind in ("code", "prose"))
    return [ids for both in zip(*(p[::10][: num // 2] for p in kinds)) for ids in both]


PROMPT = [5, 17, 3, 80, 41, 2, 17]

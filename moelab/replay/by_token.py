"""A routing that is a function of the token, with the locality of a recorded trace.

Much of a trained router's choice is the token's: if every token of a trace takes the experts that
the trace gave it most often, the caches' hit rates stay within 0.04. ``moelab.synthesize`` writes
such a routing into a checkpoint, so that random weights repeat their experts as trained ones do.
"""

from dataclasses import dataclass

import numpy as np

from ..streaming.trace import Trace
from .locality import decode_trace, lru_hit_rate

SHARE = 0.25  # hit rates are made equal with this share of a layer's experts in slots
SPREADS = np.linspace(0, 1, 33)
KINDS_OF_THE_TRACE = 0.75  # the most of all kinds; the rest are for tokens that the trace lacks


@dataclass(frozen=True, eq=False)
class TokenRouting:
    """Which experts each token takes."""

    kinds: np.ndarray  # ``[V]``, the kind of each token; tokens of one kind route alike
    experts: np.ndarray  # ``[kinds, L, K]``, the most frequent first
    num_experts: int  # E
    spread: np.ndarray  # ``[L]``, how often a token takes another variant of an expert
    wanted: np.ndarray  # ``[L]``, the hit rate of the trace's layer that this one follows
    hit_rate: np.ndarray  # ``[L]``, the hit rate of the trace's text with this routing

    def route(self, tokens: np.ndarray) -> Trace:
        """The routing of a text, as if all of it were decoded."""
        return decode_trace(self.experts[self.kinds[tokens]], self.num_experts)


def hit_rate(trace: Trace, prompt: int = 0) -> np.ndarray:
    """The LRU hit rates ``[L]`` with a quarter of the experts in slots.

    ``prompt`` tokens at the start do not count.
    """
    slots = max(trace.experts.shape[2], round(SHARE * trace.num_experts))
    return lru_hit_rate(trace, prompt)[:, slots]


def prompt_of(trace: Trace) -> int:
    """Tokens before the first decoded one; 0 if none is decoded."""
    return int((trace.phase == "decode").argmax())


def fit(trace: Trace, L: int, E: int, K: int, V: int, kinds: int, seed: int = 0) -> TokenRouting:
    """Route each token to the experts that a trace gave it most often, in another model's shape.

    With n times as many experts as in the trace, each of the trace's has n variants, e, e + E',
    e + 2 E', ... A token takes the first, or, with the probability ``spread``, one drawn for this
    token. Each layer's spread is the one with which the trace's text has the trace's hit rate at a
    quarter of the experts. With fewer experts than in the trace, its numbers are taken modulo E.

    Layer l of L follows the trace's layer ``l * L' // L``. There are at most ``kinds`` routes: a
    token that the trace lacks, or has too rarely, shares one.
    """
    base = min(E, trace.num_experts)
    tokens, row_of, counts = np.unique(trace.tokens, return_inverse=True, return_counts=True)
    if len(tokens) < 2 or not 0 <= tokens[0] <= tokens[-1] < V or base < K:
        raise ValueError(
            f"routing: expected a trace of a text with token ids below {V}, and at least {K} "
            f"experts in trace and model, got {trace} with {len(tokens)} different tokens up to "
            f"{tokens[-1] if len(tokens) else 'none'}, for a model with {E} experts."
        )
    layer = np.arange(L) * trace.experts.shape[1] // L  # of the trace, for each of the model's
    chosen = np.zeros((len(tokens), trace.experts.shape[1], base))
    where = row_of[:, None, None], np.arange(chosen.shape[1])[:, None], trace.experts % base
    np.add.at(chosen, where, 1)
    best = np.argsort(-(chosen + chosen.sum(0) / chosen.sum()), axis=-1)[..., :K][:, layer]

    rng = np.random.default_rng(seed)
    own = np.argsort(-counts, kind="stable")[: int(kinds * KINDS_OF_THE_TRACE)]
    shared = rng.choice(len(tokens), kinds - len(own), p=counts / counts.sum())
    kind_of = rng.integers(len(own), kinds, V)
    kind_of[tokens[own]] = np.arange(len(own))
    best = best[np.concatenate([own, shared])]
    variants = (E - 1 - best) // base + 1  # that this expert has
    draw = rng.random(best.shape)
    variant = base * (rng.random(best.shape) * variants).astype(np.int64)

    prompt = prompt_of(trace)
    wanted = hit_rate(trace, prompt)[layer]
    spread, got, experts = np.zeros(L), np.full(L, np.inf), best.copy()
    for s in SPREADS:
        tried = best + np.where(draw < s, variant, 0)
        rate = hit_rate(decode_trace(tried[kind_of[trace.tokens]], E), prompt)
        better = abs(rate - wanted) < abs(got - wanted)
        spread[better], got[better], experts[:, better] = s, rate[better], tried[:, better]
    return TokenRouting(kind_of, experts, E, spread, wanted, got)

"""Speed of a limited model by prefetcher, for guesses of a given quality.

    python data/recipes/early.py OUT.json MODEL TRACE ROUNDS LIMIT_MB

In a round every variant decodes the same tokens from the same slots, in a random order, in one
process: 2 tokens and then 12 timed ones. The model's routers choose by the token alone, so that
each guess is right until the recipe replaces it by an expert drawn at random. ``null`` reads as
many experts as the early router does, none of them needed. In a model with such routers the next
layer's router names what an oracle would, at the cost of one small product a layer.
"""

import random
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from peers import apart

import moelab
from moelab.hooks import hooked
from moelab.kernels.layers import Layer
from moelab.lab import oscache, records
from moelab.lab.models import folder
from moelab.streaming.layers import moe_blocks
from moelab.streaming.prefetch import PREFETCHERS
from moelab.streaming.session import session_of
from moelab.streaming.trace import Trace

FILL, SETTLE, TOKENS = 96, 2, 12  # FILL: tokens that fill the slots of a new process
VARIANTS = {  # the prefetcher, the share of its guesses that is made, and the share that is right
    "none": (None, 0, 0),
    "router, all right": ("router", 1, 1),
    "router, 0.90 right": ("router", 0.77, 0.90),  # as on tiny-moe
    "next layer, 0.75 right": ("lookahead", 1, 0.75),
    "null": ("router", 1, 0),
    "oracle": ("lookahead", 1, 1),
}


class Guesses:
    """Replaces what a prefetcher names, ``made`` and ``right`` with these probabilities."""

    def __init__(self, session):
        self.layers, self.rng = session.residency.layers, np.random.default_rng(0)
        self.made = self.right = 1

    def __call__(self, prefetch, i, experts, kept=()):
        named, held = [], self.layers[i].table.slot_of
        for e in experts:
            if self.rng.random() >= self.made or (self.right == 0 and e in held):
                continue
            is_right = self.rng.random() < self.right
            while not is_right and (e in experts or e in named or (self.right == 0 and e in held)):
                e = int(self.rng.integers(self.layers[i].num_experts))
            named.append(e)
        return prefetch(i, named, kept)


def held(session):
    """The experts in each layer's slots and what its policy counts, once no read is running."""
    session.reader.stop()
    session.residency.recover()
    tables = [layer.table for layer in session.residency.layers]
    return [(list(t.slot_of), dict(t._counts), t._one) for t in tables]


def hold(session, layers):
    """Bring the experts of ``held`` back into the slots."""
    held(session)
    for i, (experts, counts, one) in enumerate(layers):
        session.residency.read(i, experts)
        table = session.residency.layers[i].table
        table.slot_of = {e: table.slot_of[e] for e in experts}
        table._counts, table._one = defaultdict(float, counts), one
        table.recover()


def rounds(path, trace, runs):
    """The rows of so many rounds, in this process."""
    text = Trace.load(trace).tokens.tolist()
    model, _ = moelab.load(path, moelab.StreamConfig(slots="auto", context=512))
    session, blocks, order = session_of(model), moe_blocks(model), random.Random(0)
    makes = {
        name: PREFETCHERS[name](session.layers, blocks) for name, *_ in VARIANTS.values() if name
    }
    guesses = Guesses(session)
    hooked(session.residency, guesses, "prefetch").install()

    def read(tokens):
        took = []
        for token in tokens:
            begin = perf_counter()
            mx.eval(model(mx.array([[token]]), cache=cache))
            took.append(perf_counter() - begin)
        return took

    cache, rows, at = make_prompt_cache(model), [], FILL
    read(text[:FILL])
    for i in range(runs):
        cache, begin = make_prompt_cache(model), held(session)
        here = [text[(at + n) % len(text)] for n in range(SETTLE + TOKENS)]
        at += len(here)
        for variant in order.sample([*VARIANTS], len(VARIANTS)):
            name, guesses.made, guesses.right = VARIANTS[variant]
            hold(session, begin)
            session.prefetcher, session.residency.prefetches = makes.get(name), name is not None
            for layer in model.modules():
                if isinstance(layer, Layer):  # what it recorded is of another prefetcher
                    layer.__dict__["_passes"].clear()
            read(here[:SETTLE])
            moelab.stats(model, reset=True)
            step_s = read(here[SETTLE:])
            row = asdict(moelab.stats(model).decode) | {"variant": variant, "round": i}
            row |= {"decode_s": sum(step_s), "decode_tokens": TOKENS, "step_s": step_s}
            rows.append(row | {"slots": session.plan.slots, "plan": session.plan.reason})
    return rows


def main(out, path, trace, runs, limit_mb):
    path, limit = folder(path), int(limit_mb) * 1_000_000
    told = {"model": path.name, "tokens": TOKENS, "warmup_tokens": SETTLE}
    told |= {"feed": Path(trace).name, "cache_state": "cold", "limit_nbytes": limit}
    running = records.Running("early", told)
    oscache.drop_pages(path)
    rows, done = apart(early.rounds, str(path), trace, int(runs), what="early", nbytes=limit)
    if rows is None:
        raise OSError(f"early: killed in {limit_mb} MB")
    samples = running.table([row | {"limited_by": done.how} for row in rows])
    shown = records.with_ratio(samples, "none").assign(mb=samples.read_nbytes_per_token / 1e6)
    columns = ["token_s", "ratio", "wait_s", "mb", "hit_rate", "prefetch_issued"]
    columns += ["prefetch_used", "prefetch_late", "prefetch_wasted"]
    text = shown.groupby("variant", sort=False)[columns].median()
    records.print_and_save(text.to_string(float_format="{:.4g}".format), samples, out)


if __name__ == "__main__":
    import early  # whose functions another process finds

    main(*sys.argv[1:])

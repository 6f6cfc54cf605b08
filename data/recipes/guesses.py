"""Speed of a limited model for guesses of a given quality: of experts, or of tokens (drafts).

    python data/recipes/guesses.py experts OUT.json MODEL TRACE ROUNDS LIMIT_MB
    python data/recipes/guesses.py drafts OUT.json MODEL TRACE ROUNDS LIMIT_MB

All variants decode in one process, in a random order each round. To load the model for each of
them, as ``bench`` does, takes five times as long.

``experts``: in a round every prefetcher decodes the same tokens from the same slots: 2 tokens and
then 12 timed ones. The model's routers choose by the token alone, so every guess is right. The
recipe replaces some of them by experts drawn at random. ``null`` reads as many experts as the early
router does, none of them needed. ``oracle`` asks the next layer's router early, which costs one
small product a layer.

``drafts``: with each number of drafts the model reads 6 tokens of the trace's text and then 24
timed ones. Slots are not emptied in between. A guess costs a pass of the target's lm_head, as an
MTP head's does; its one layer (a fortieth of a token's arithmetic) and its 0.5 GB are left out. A
policy sees one text that goes on in each of its turns.
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

from moelab import StreamConfig, load, stats
from moelab.hooks import hooked
from moelab.kernels.layers import Layer
from moelab.lab import limit, oscache, records
from moelab.lab.decode import OracleDraft, decode_drafted
from moelab.lab.models import folder
from moelab.speculation.drafts import LookupDraft
from moelab.speculation.policy import Policy
from moelab.speculation.target import embedding_and_head
from moelab.streaming.layers import moe_blocks
from moelab.streaming.prefetch import PREFETCHERS
from moelab.streaming.session import session_of
from moelab.streaming.trace import Trace

# Tokens read at first to fill the slots; untimed ones after each change of variant; timed ones.
EXPERTS = {"fill": 96, "settle": 2, "tokens": 12}
DRAFTS = {"fill": 48, "settle": 6, "tokens": 24}
PREFETCHED = {  # the prefetcher, the share of its guesses that is made, and the share that is right
    "none": (None, 0, 0),
    "router, all right": ("router", 1, 1),
    "router, 0.90 right": ("router", 0.77, 0.90),  # as on tiny-moe
    "next layer, 0.75 right": ("lookahead", 1, 0.75),
    "null": ("router", 1, 0),
    "oracle": ("lookahead", 1, 1),
}
SHARES, LENGTHS, PROMPT = (0.5, 0.7, 0.9), (1, 2, 3), 16
STEP = 97  # a round's text begins so many tokens after the one before


# Guesses of experts


class Guesses:
    """Changes a prefetcher's guesses: each is kept, and is right, with a given probability."""

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


def experts(path, trace, runs):
    """The rows of so many rounds, in this process."""
    text, (fill, settle, tokens) = Trace.load(trace).tokens.tolist(), EXPERTS.values()
    model, _ = load(path, StreamConfig(slots="auto", context=512, prefetch="none"))
    session, blocks, order = session_of(model), moe_blocks(model), random.Random(0)
    makes = {
        name: PREFETCHERS[name](session.layers, blocks) for name, *_ in PREFETCHED.values() if name
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

    cache, rows, at = make_prompt_cache(model), [], fill
    read(text[:fill])
    for i in range(runs):
        cache, begin = make_prompt_cache(model), held(session)
        here = [text[(at + n) % len(text)] for n in range(settle + tokens)]
        at += len(here)
        for variant in order.sample([*PREFETCHED], len(PREFETCHED)):
            name, guesses.made, guesses.right = PREFETCHED[variant]
            hold(session, begin)
            session.prefetcher, session.residency.prefetches = makes.get(name), name is not None
            for layer in model.modules():
                if isinstance(layer, Layer):  # what it recorded is of another prefetcher
                    layer.__dict__["_passes"].clear()
            read(here[:settle])
            stats(model, reset=True)
            step_s = read(here[settle:])
            row = asdict(stats(model).decode) | {"variant": variant, "round": i}
            row |= {"decode_s": sum(step_s), "decode_tokens": tokens, "step_s": step_s}
            rows.append(row | {"slots": session.plan.slots, "plan": session.plan.reason})
    return rows


# Guesses of tokens


def one_text():
    """A policy whose text goes on when another call decodes more of it."""
    policy = Policy()
    policy.begin = lambda max_tokens=-1: None
    return policy


class Head(OracleDraft):
    """A draft that computes the target's lm_head for each guess, one after the other."""

    def bind(self, model, cache=None):
        super().bind(model, cache)
        embed, self._head = embedding_and_head(model)
        self._hidden = embed(mx.array([[0]]))

    def propose(self, last, n, choose):
        for _ in range(n):
            mx.eval(mx.argmax(self._head(self._hidden), axis=-1))
        return super().propose(last, n, choose)


def drafts(path, trace, runs):
    """The rows of so many rounds, in this process."""
    text, order, settle = Trace.load(trace).tokens.tolist(), random.Random(0), DRAFTS["settle"]
    model, _ = load(path, StreamConfig(slots="auto", context=512), draft=LookupDraft())

    def read_on(i, accept, number, tokens=DRAFTS["tokens"], prompt=1):
        """Read a prompt of the round's text, tokens to settle, and so many timed ones."""
        nonlocal rest
        feed = rest[prompt:][: 1 + settle + tokens]
        draft, amount = Head(rest, accept, i), {"tokens": tokens, "warmup": settle}
        ran = decode_drafted(model, rest[:prompt], draft, number, **amount, feed=feed, cache=cache)
        rest = rest[prompt + len(feed) :]
        return ran

    variants = [("none", 0.0, 0)]
    variants += [(f"{share:g}, {n} drafts", share, n) for share in SHARES for n in LENGTHS]
    variants += [(f"{share:g}, policy", share, one_text()) for share in SHARES]
    plan, rows = session_of(model).plan, []
    for i in range(runs):
        at = i * STEP % len(text)
        rest, cache = (text[at:] + text[:at]) * 2, make_prompt_cache(model)
        read_on(i, 0.0, 0, DRAFTS["tokens"] if i else DRAFTS["fill"], PROMPT)
        for name, share, n in order.sample(variants, len(variants)):
            ran = read_on(i, share, n)
            row = vars(ran) | asdict(ran.counters) | {"variant": name, "round": i}
            row |= {"share": share, "num_drafts": name.split(", ")[-1], "rounds": len(ran.rounds)}
            row |= {"slots": plan.slots, "plan": plan.reason}
            row["lengths"] = [drafted for drafted, *_ in ran.rounds]
            row |= {"drafted": sum(row["lengths"]), "accepted": sum(r[1] for r in ran.rounds)}
            row["draft_s"] = sum(r[2] for r in ran.rounds if r[0])
            row["verify_s"] = sum(r[3] for r in ran.rounds if r[0])
            del row["counters"], row["tokens"]
            rows.append(row)
        mx.clear_cache()
    return rows


SHOWN = {  # columns of the table that is printed
    "experts": "token_s ratio wait_s mb hit_rate prefetch_issued prefetch_used prefetch_late "
    "prefetch_wasted",
    "drafts": "tok_s ratio hit_rate mb tau wait_s draft_s",
}


def main(what, out, path, trace, runs, limit_mb):
    path, nbytes = folder(path), int(limit_mb) * 1_000_000
    run, amount = {"experts": (experts, EXPERTS), "drafts": (drafts, DRAFTS)}[what]
    told = {"model": path.name, "tokens": amount["tokens"], "warmup_tokens": amount["settle"]}
    told |= {"feed": Path(trace).name, "cache_state": "cold", "limit_nbytes": nbytes}
    running = records.Running(what, told)
    oscache.drop_pages(path)
    rows, done = limit.call(run, path, trace, int(runs), what=what, nbytes=nbytes)
    if rows is None:
        raise OSError(f"{what}: killed in {limit_mb} MB")
    samples = running.table([row | {"limited_by": done.how} for row in rows])
    shown = records.with_ratio(samples, "none").assign(mb=samples.read_nbytes_per_token / 1e6)
    text = shown.groupby("variant", sort=False)[SHOWN[what].split()].median()
    records.print_and_save(text.to_string(float_format="{:.4g}".format), samples, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

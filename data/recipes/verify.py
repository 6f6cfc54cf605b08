"""Speed of a limited model by the number of drafts, for guesses of a given quality.

    python data/recipes/verify.py OUT.json MODEL TRACE ROUNDS LIMIT_MB [SEED]

Each round reads the trace's text in a new order of the variants, 6 tokens and then 24 timed ones
for each, in one process whose slots stay as they are. To load the model for each of them, as
``bench`` does, takes five times as long. A guess costs a pass of the target's lm_head, as an
MTP head's does; its one layer (a fortieth of a token's arithmetic) and its 0.5 GB are left out. A
policy sees one text that goes on in each of its turns.
"""

import random
import sys
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from peers import apart

from moelab import StreamConfig, load
from moelab.lab import oscache, records
from moelab.lab.decode import OracleDraft, decode_drafted
from moelab.lab.models import folder
from moelab.speculation.policy import MAX_DRAFTS, Policy
from moelab.speculation.target import embedding_and_head
from moelab.streaming.session import session_of
from moelab.streaming.trace import Trace

SHARES, LENGTHS = (0.5, 0.7, 0.9), (1, 2, 3, "auto")
PROMPT, FILL, SETTLE, TOKENS = 16, 48, 6, 24  # FILL: tokens that fill the slots of a new process
STEP = 97  # a round's text begins so many tokens after the one before


class OneText(Policy):
    """A policy whose text goes on when another call decodes more of it."""

    def __init__(self):
        super().__init__()
        self.begin = lambda max_tokens=-1: None


class Head(OracleDraft):
    """A draft that computes the target's lm_head for each guess, one after the other."""

    def bind(self, model, cache=None):
        super().bind(model, cache)
        (embed, self._head) = embedding_and_head(model)
        self._hidden = embed(mx.array([[0]]))

    def propose(self, last, n, choose):
        for _ in range(n):
            mx.eval(mx.argmax(self._head(self._hidden), axis=-1))
        return super().propose(last, n, choose)


class Reading:
    """A text that is read on, with any draft."""

    def __init__(self, model, tokens):
        self.model, self.tokens, self.read = model, tokens, 0
        self.cache = make_prompt_cache(model)

    def on(self, accept, number, tokens, prompt=1, seed=0):
        """Read a prompt, tokens to settle, and so many timed ones."""
        rest, size = self.tokens[self.read :], 1 + SETTLE + tokens
        self.read += prompt + size
        draft, feed = Head(rest, accept, seed), rest[prompt:][:size]
        amount = {"tokens": tokens, "warmup": SETTLE, "feed": feed, "cache": self.cache}
        return decode_drafted(self.model, rest[:prompt], draft, number, **amount)


def rounds(path, trace, runs, seed):
    """The rows of so many rounds, in this process."""
    text, order = Trace.load(trace).tokens.tolist(), random.Random(seed)
    model, _ = load(path, StreamConfig(slots="auto", context=512, verify_tokens=MAX_DRAFTS + 1))
    policies = {share: OneText() for share in SHARES}
    variants = [("none", 0.0, 0)]
    variants += [(f"{share:g}, {n} drafts", share, n) for share in SHARES for n in LENGTHS[:-1]]
    variants += [(f"{share:g}, policy", share, policies[share]) for share in SHARES]
    plan, rows = session_of(model).plan, []
    for i in range(runs):
        number = seed * runs + i
        at = number * STEP % len(text)
        reading = Reading(model, (text[at:] + text[:at]) * 2)
        reading.on(0.0, 0, TOKENS if i else FILL, PROMPT)
        for name, share, n in order.sample(variants, len(variants)):
            ran = reading.on(share, n, TOKENS, seed=number)
            row = vars(ran) | asdict(ran.counters) | {"variant": name, "round": number}
            row |= {"share": share, "num_drafts": name.split(", ")[-1], "rounds": len(ran.rounds)}
            row |= {"slots": plan.slots, "plan": plan.reason}
            row |= {"drafted": sum(r[0] for r in ran.rounds)}
            row |= {
                "accepted": sum(r[1] for r in ran.rounds),
                "lengths": [r[0] for r in ran.rounds],
            }
            row["draft_s"] = sum(r[2] for r in ran.rounds if r[0])
            row["verify_s"] = sum(r[3] for r in ran.rounds if r[0])
            del row["counters"], row["tokens"]
            rows.append(row)
        mx.clear_cache()
    return rows


def main(out, path, trace, runs, limit_mb, seed="0"):
    path, limit = folder(path), int(limit_mb) * 1_000_000
    settings = {
        "model": path.name,
        "tokens": TOKENS,
        "warmup_tokens": SETTLE,
        "feed": Path(trace).name,
    }
    running = records.Running("verify", settings | {"cache_state": "cold", "seed": int(seed)})
    oscache.drop_pages(path)
    arguments = str(path), trace, int(runs), int(seed)
    rows, done = apart(verify.rounds, *arguments, what="verify", nbytes=limit)
    if rows is None:
        raise OSError(f"verify: killed in {limit_mb} MB")
    told = {"limit_nbytes": limit, "limited_by": done.how}
    samples = running.table([row | told for row in rows])
    by = samples.assign(mb=samples.read_nbytes_per_token / 1e6).groupby("variant", sort=False)
    median = by[["tok_s", "hit_rate", "mb", "tau", "wait_s", "draft_s"]].median()
    records.print_and_save(median.to_string(float_format="{:.4g}".format), samples, out)


if __name__ == "__main__":
    import verify  # whose functions another process finds

    main(*sys.argv[1:])

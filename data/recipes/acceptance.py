"""How many drafts are accepted, by kind of text and by their place in a round.

    python data/recipes/acceptance.py DRAFT...

A DRAFT is a folder, ``lookup`` or ``mtp``. 4 drafts a round, greedy, 100 tokens behind each of 12
prompts of 256 tokens of tiny-moe's held-out text. *Copying* is 192 tokens and their first 64 again.
"""

import sys

import mlx.core as mx
import numpy as np

from moelab import DATA, StreamConfig, load
from moelab.commands.drafting import open_draft
from moelab.lab.machine import card, card_line
from moelab.lab.texts import spaced_prompts
from moelab.speculation.generate import speculative_generate_step

MODEL, PROMPTS, DRAFTS, TOKENS = DATA / "models" / "tiny-moe", 12, 4, 100


def main(*drafts):
    """Print a line for each draft and kind of text."""
    model, _ = load(MODEL, StreamConfig(slots=48))
    texts = {kind: spaced_prompts(MODEL, kind, 256, PROMPTS) for kind in ("code", "prose")}
    texts["copying"] = [p + p[:64] for p in spaced_prompts(MODEL, "code", 192, PROMPTS)]
    print(card_line(card()))
    for name in drafts:
        draft = open_draft(name, "auto", MODEL)
        for kind, prompts in texts.items():
            rounds = [r for p in prompts for r in written(model, draft, p)]
            asked = [r for r in rounds if r.drafted]
            reached = [[r for r in asked if r.drafted > i <= r.accepted] for i in range(DRAFTS)]
            share = [f"{np.mean([r.accepted > i for r in at]):.2f}" for i, at in enumerate(reached)]
            ms = np.quantile([r.draft_s * 1e3 for r in asked], (0.5, 0.25, 0.75))
            tau = np.mean([r.accepted + 1 for r in rounds])
            print(
                f"{name}, {kind}: accepted {', '.join(share)} by place; tau {tau:.2f} of "
                f"{len(rounds)} rounds; drafting {ms[0]:.2f} [{ms[1]:.2f}, {ms[2]:.2f}] ms"
            )


def written(model, draft, prompt):
    """The rounds of a text."""
    amount = {"num_draft_tokens": DRAFTS, "max_tokens": TOKENS}
    steps = speculative_generate_step(mx.array(prompt), model, draft, **amount)
    return dict.fromkeys(round for *_, round in steps)


if __name__ == "__main__":
    main(*sys.argv[1:])

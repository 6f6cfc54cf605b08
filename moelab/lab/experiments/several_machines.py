"""Where experts should lie if several machines divide them: replayed, not measured.

python -m moelab.lab placements OUT.json

What ranks of this machine do is in ``experiments.ranks``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...replay import ranks as replay
from ...replay.locality import popularity, recorded_trace
from ...streaming.ranks import balanced, by_number
from .. import records
from .ranks import size

if TYPE_CHECKING:
    from pandas import DataFrame

FILLING = 64  # tokens at the start of a trace that only fill the slots
HOT = 2  # experts of a layer that all ranks hold, in one of the placements
PLACEMENTS = (
    "by number",
    "balanced by a trace",
    f"{HOT} hot experts on all",
    "whoever reads least",
)
BALANCE = "perfect balance"
TEXTS = ("code", "tests", "prose", "docs", "sampled")


def placements(
    texts: Sequence[str] = TEXTS, cases: Sequence[tuple[int, int]] = ((2, 16), (4, 8))
) -> "DataFrame":
    """Replay the reads that ranks wait for, by placement of tiny-moe's experts."""
    running = records.Running("placements", {"model": "tiny-moe", "filling_tokens": FILLING})
    traces = [recorded_trace(text) for text in texts]
    rows = []
    for i, (text, trace) in enumerate(zip(texts, traces)):
        others = [t.decode for other, t in zip(texts, traces) if other != text]
        for n, slots in cases:
            waited = _waited(trace, others, n, slots)
            rows += [
                {
                    "variant": f"{name}, {size(n)}",
                    "round": i,
                    "text": text,
                    "ranks": n,
                    "size": size(n),
                    "slots": slots,
                    "placement": name,
                    "waited": reads,
                    "over_number": reads / waited[PLACEMENTS[0]],
                }
                for name, reads in waited.items()
            ]
    return running.table(rows)


def _waited(trace, others, n, slots):
    """Reads of a token that n ranks wait for, by placement."""
    experts, E = trace.decode.experts, trace.num_experts
    number = by_number(experts.shape[1], E, n)
    by_trace = balanced(np.concatenate([t.experts for t in others]), E, n)
    hot = np.argsort(-sum(map(popularity, others)), axis=1)[:, :HOT].tolist()
    found = {}
    for name, *where in zip(PLACEMENTS, (number, by_trace, number, None), ((), (), hot, ())):
        owners, shared = where
        read = replay.reads(experts, owners, slots, n, shared)[FILLING:]
        found[name], mean = replay.waited(read)
        found.setdefault(BALANCE, mean)  # the mean of the first text, with placement by number
    return {name: found[name] for name in (*PLACEMENTS, BALANCE)}


def main(out: str) -> None:
    """Write the record of ``placements``."""
    made = placements()
    records.print_and_save(records.group(made, "over_number").to_string(), made, out)

"""Where experts should lie, and machines that we do not have: replayed and modelled, not measured.

python -m moelab.lab placements OUT.json

What ranks of this machine do is in ``experiments.ranks``.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ...replay import ranks as replay
from ...replay.locality import popularity, recorded_trace
from ...streaming.placement import balanced, by_number
from ...streaming.trace import Trace
from .. import records
from .ranks import EXPERT_NBYTES, HELD, size

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
# Qwen3.5-122B-A10B: layers, width, experts of a layer, and bytes of one: three matrices of 4 bits
# with a scale and a bias for 64 weights. A row is sent in bfloat16.
L_122B, D_122B, E_122B, VALUE_NBYTES = 48, 3072, 256, 2
EXPERT_NBYTES_122B = 3 * D_122B * 1024 * 36 // 64


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


def checked(divided: "DataFrame", tokens: int = 200) -> "DataFrame":
    """Add the model's time ``model_s`` to each run with a simulated SSD.

    Random weights route nearly at random, so a random routing is replayed. Arithmetic and exchange
    are those of as many ranks that hold every expert: only the reads are predicted.
    """
    random, layers, top_k, E = np.random.default_rng(0), 4, 8, 256
    experts = random.random((tokens + FILLING, layers, E)).argsort(2)[:, :, :top_k]
    runs = divided.dropna(subset=["rate_bytes_per_s"])
    (slots,) = set(runs.slots.astype(int))
    read = {
        n: replay.waited(replay.reads(experts, by_number(layers, E, n), slots, n)[FILLING:])[0]
        for n in set(runs.ranks)
    }
    held_s = divided[divided["where"] == HELD].groupby("ranks").token_s.median()
    reads_s = runs.ranks.map(read) * EXPERT_NBYTES / runs.rate_bytes_per_s
    return runs.assign(model_s=reads_s + runs.ranks.map(held_s))


def parts_122b(
    trace: Trace, n: int, slots: int, disk: float, link: float, latency_s: float, compute_s: float
) -> dict[str, float]:
    """The model's seconds of a token of Qwen3.5-122B-A10B on n machines, by part.

    Its experts repeat as those of the trace do, with the same share of them in slots. Each machine
    is charged all the arithmetic, which is too much, since experts are divided.
    """
    held = max(1, min(slots * trace.num_experts // E_122B, -(-trace.num_experts // n)))
    read, rows = _replayed(trace, n, held)
    layers = trace.experts.shape[1]
    machines = replay.Machines(n, disk, link, latency_s, compute_s)
    row_nbytes = D_122B * VALUE_NBYTES
    return machines.parts(read / layers * L_122B, EXPERT_NBYTES_122B, L_122B, rows, row_nbytes)


@cache
def _replayed(trace, n, slots):
    """Replay the reads that are waited for, and the rows of a layer's largest block."""
    experts = trace.decode.experts
    owners = by_number(experts.shape[1], trace.num_experts, n)
    read = replay.waited(replay.reads(experts, owners, slots, n)[FILLING:])[0]
    of = np.take_along_axis(owners[None], experts.astype(np.intp), 2)
    pairs = np.stack([(of == rank).sum(2) for rank in range(n)]).max(0)
    return read, float(pairs.mean()) + 1  # plus the row of checks


def main(out: str) -> None:
    """Write the record of ``placements``."""
    made = placements()
    records.print_and_save(records.group(made, "over_number").to_string(), made, out)

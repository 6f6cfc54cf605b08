"""Notebook 04: how often the experts of a token are among those that were just used.

    python -m moelab.lab locality OUT.json

By replay of recorded routing, for every policy of eviction and number of slots. With K slots and
``lru`` a layer holds exactly the K experts of the last token.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import TYPE_CHECKING

from ...replay.eviction import held
from ...replay.locality import recorded_trace
from ...streaming.trace import Trace
from .. import records

if TYPE_CHECKING:
    from pandas import DataFrame

TEXTS = ("code", "tests", "prose", "docs", "sampled")  # in data/traces
POLICIES = ("lru", "lfu", "lrfu", "s3-fifo", "belady")
SLOTS = (8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64)
FILLING = 64  # tokens at the start of a trace that only fill the slots


def reuse(
    traces: Mapping[str, Trace],
    slots: Iterable[int] = SLOTS,
    policies: Iterable[str] = POLICIES,
    skip: int = FILLING,
) -> "DataFrame":
    """Count how many of the experts that tokens need are in slots, by text, policy and slots.

    ``all_held`` is the share of layers' tokens that find all of their K experts.
    """
    rows, running = [], records.Running("locality", {"filling_tokens": skip})
    for i, (name, trace) in enumerate(traces.items()):
        experts, E = trace.decode.experts, trace.num_experts
        for policy, S in product(policies, slots):
            hit = held(experts, E, S, policy)[skip:]
            rows.append(
                {
                    "variant": f"{policy}, {S} slots",
                    "round": i,
                    "text": name,
                    "policy": policy,
                    "slots": S,
                    "hits": int(hit.sum()),
                    "misses": int((~hit).sum()),
                    "all_held": float(hit.all(-1).mean()),
                }
            )
    return running.table(rows)


def main(out: str) -> None:
    """Measure the recorded traces of tiny-moe and save the record."""
    samples = reuse({name: recorded_trace(name) for name in TEXTS})
    found = records.group(samples, "hit_rate", ["policy", "slots"])
    records.print_and_save(
        found["median"].unstack().to_string(float_format="{:.3f}".format), samples, out
    )

"""What one rank does in ``tests/streaming/test_ranks.py``: greedy tokens of several models.

    python rank_work.py MODEL SETTINGS [HOW]    HOW: what goes wrong amid an answer

After an error the process ends as a command does: with one line on stderr and status 1.
"""

import hashlib
import json
import os
import signal
import sys

import mlx.core as mx
import numpy as np
from common import LONG, greedy_logits

import moelab
from moelab.streaming import ranks
from moelab.streaming.model import load_model
from moelab.streaming.session import session_of


def decode(group: mx.distributed.Group | None, cases: list[tuple[str, dict]]) -> list[tuple]:
    """Return for each model a hash of all logits, the experts read ``[L, E]``, hits and misses."""
    found = []
    for model_path, fields in cases:
        # As in the tests' process, which compares. A Mac's GPU would read ahead with one rank.
        config = {"dtype": "float32", "prefetch": "none", **fields}
        model, _ = load_model(model_path, moelab.StreamConfig(**config), group=group)
        with model:
            layers = session_of(model).layers
            read = np.zeros((len(layers), max(layer.num_experts for layer in layers)), bool)
            for layer in layers:
                spy(layer, read[layer.index])
            logits = greedy_logits(model, LONG[:20], 4)
            stats = moelab.stats(model)
        counts = stats.prefill.hits, stats.prefill.misses
        found.append((hashlib.sha256(logits.tobytes()).hexdigest(), read.tolist(), counts))
    return found


def spy(layer, read):
    """Set ``read[expert]`` for each expert that a layer reads."""
    bank = layer.slots.bank if hasattr(layer, "slots") else layer._bank
    reads = bank.reads

    def noted(slots):
        read[[*slots]] = True
        return reads(slots)

    bank.reads = noted


def goes_wrong(how, session):
    """Make routing number 20 raise, end the process, or choose other experts."""
    routing, number = session.routing, iter(range(10_000))

    def wrong(*args):
        routed = routing(*args)
        if next(number) == 20:
            if how == "raise":
                raise ValueError("no more")
            if how != "other":
                os.kill(os.getpid(), getattr(signal, how))
            return (routed + 1) % session.layers[0].num_experts
        return routed

    session.routing = wrong


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    ranks.PATIENCE_S = 3
    model_path, settings, *how = sys.argv[1:]
    try:
        group = mx.distributed.init(strict=True, backend="ring")
        model, _ = load_model(model_path, moelab.StreamConfig(**json.loads(settings)), group=group)
        if how:
            goes_wrong(how[0], session_of(model))
        print("loaded", flush=True)
        greedy_logits(model, [1, 2, 3], 200)
    except (ValueError, OSError) as error:
        sys.exit(f"moelab: {error}")

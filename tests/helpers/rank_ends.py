"""One rank of ``tests/streaming/test_ranks.py`` that goes wrong.

    python rank_ends.py MODEL SETTINGS [HOW]    HOW: what it does in the middle of an answer

It ends as a command does: one line on stderr and status 1.
"""

import json
import os
import signal
import sys

import mlx.core as mx
from common import greedy_logits

import moelab
from moelab.streaming import ranks
from moelab.streaming.model import load_model
from moelab.streaming.session import session_of


def goes_wrong(how, session):
    """The routing of call number 20 of a layer is not as it should be."""
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
    ranks.PATIENCE_S = 5
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

"""What one rank does in ``tests/streaming/test_ranks.py``: greedy tokens of several models.

    python rank_decode.py CASES OUT    CASES: JSON, for each case a model and fields of StreamConfig

Each rank writes ``OUT/RANK.npz``: for each case the logits of the prompt's last token and of each
token after it, the experts that were read, and the counters.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from greedy import greedy_logits

import moelab
from moelab.streaming.model import load_model
from moelab.streaming.session import session_of

PROMPT, STEPS = [(31 * i + 5) % 96 for i in range(20)], 4


def decode(model_path, fields, group):
    """Logits, ``[L, E]`` whether an expert was read, hits and misses."""
    model, _ = load_model(model_path, moelab.StreamConfig(**fields), group=group)
    with model:
        layers = session_of(model).layers
        read = np.zeros((len(layers), max(layer.num_experts for layer in layers)), bool)
        for layer in layers:
            spy(layer, read[layer.index])
        logits = greedy_logits(model, PROMPT, STEPS)
        stats = moelab.stats(model)
    return logits, read, [stats.prefill.hits, stats.prefill.misses, stats.decode.misses]


def spy(layer, read):
    """Note the experts that a layer reads."""
    bank_of = layer._take_bank

    def watched(bank):
        reads = bank.reads

        def noted(slots):
            read[[*slots]] = True
            return reads(slots)

        bank.reads = noted
        return bank

    bank = layer.slots.bank if hasattr(layer, "slots") else getattr(layer, "_bank", None)
    if bank is not None:
        watched(bank)
    layer._take_bank = lambda *args: watched(bank_of(*args))


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    ranks = mx.distributed.init()
    found = {}
    for i, (model_path, settings) in enumerate(cases):
        for name, value in zip(("logits", "read", "counts"), decode(model_path, settings, ranks)):
            found[f"{name}{i}"] = value
    np.savez(out / f"{ranks.rank()}.npz", **found)

"""How well a model predicts held-out text, in bits per byte.

Bits per byte can be compared between tokenizers. A model that needs b bits per byte would compress
the text to b/8 of its size.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np


@dataclass(frozen=True)
class Windows:
    """Pieces of text to predict; in a file each piece starts where the piece before it ended."""

    ids: np.ndarray  # ``[N, T + 1]``; the first id of a row is only read, the others predicted
    counts: np.ndarray  # ``[N]`` how many ids of each row are predicted; the rest is padding
    nbytes: np.ndarray  # ``[N]`` bytes of the text of each row's predicted ids


def windows(tokenizer, texts, length: int = 256, count: int | None = None) -> Windows:
    """Cut texts into windows of ``length`` ids; keep ``count`` of them, spread evenly."""
    start = tokenizer.eos_token_id
    rows, counts, nbytes = [], [], []
    for text in texts:
        encoded = tokenizer._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = [start, *encoded["input_ids"]]
        ends = [begin for begin, _ in encoded["offset_mapping"]] + [len(text)]
        for i in range(0, len(ids) - 1, length):
            row = ids[i : i + length + 1]
            rows.append(row + [start] * (length + 1 - len(row)))
            counts.append(len(row) - 1)
            nbytes.append(len(text[ends[i] : ends[i + len(row) - 1]].encode()))
    num = min(count or len(rows), len(rows))
    keep = np.linspace(0, len(rows) - 1, num).round().astype(int)
    return Windows(*(np.array(part)[keep] for part in (rows, counts, nbytes)))


def score(model, some: Windows, batch: int = 4) -> np.ndarray:
    """Return the bits ``[N]`` that a model needs for every window, ``batch`` windows in a call."""
    bits = []
    for i in range(0, len(some.ids), batch):
        counts = some.counts[i : i + batch]
        ids = mx.array(some.ids[i : i + batch, : counts.max() + 1])
        logits = model(ids[:, :-1]).astype(mx.float32)
        nats = nn.losses.cross_entropy(logits, ids[:, 1:], reduction="none")
        kept = mx.arange(nats.shape[1]) < mx.array(counts)[:, None]
        bits += ((nats * kept).sum(1) / np.log(2)).tolist()
    return np.array(bits)

"""How well a model predicts held-out text, in bits per byte.

Bits per byte do not depend on the tokenizer: a model that needs b of them would compress the text
to b/8 of its size.
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
    nbytes: np.ndarray  # ``[N]`` bytes of the text of these ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows) -> "Windows":
        """Select windows by a slice or an array of row numbers, padded to the longest of them."""
        counts = self.counts[rows]
        return Windows(self.ids[rows][:, : counts.max(initial=0) + 1], counts, self.nbytes[rows])


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
    cut = Windows(np.array(rows), np.array(counts), np.array(nbytes))
    if count is None or count >= len(cut):
        return cut
    keep = np.linspace(0, len(cut) - 1, count).round().astype(int)
    return Windows(cut.ids[keep], cut.counts[keep], cut.nbytes[keep])


def score(model, some: Windows, batch: int = 4) -> np.ndarray:
    """Return the bits ``[N]`` that a model needs for every window, ``batch`` windows in a call."""
    bits = []
    for i in range(0, len(some), batch):
        part = some[i : i + batch]
        ids, counts = mx.array(part.ids), mx.array(part.counts)
        logits = model(ids[:, :-1]).astype(mx.float32)
        nats = nn.losses.cross_entropy(logits, ids[:, 1:], reduction="none")
        kept = mx.arange(nats.shape[1]) < counts[:, None]
        bits += ((nats * kept).sum(1) / np.log(2)).tolist()
    return np.array(bits)

"""How well a model predicts held-out text, in bits per byte.

Bits per byte do not depend on the tokenizer: a model that needs b of them would compress the text to b/8 of its size.
"""

import dataclasses
import lzma
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from .. import StreamConfig, load


@dataclass(frozen=True)
class Windows:
    """Pieces of text to predict: each starts where the one before it in its file ended.

    Attributes:
        ids (np.ndarray): ``[N, T + 1]``; the first id of a row is only read, the rest are predicted.
        counts (np.ndarray): ``[N]`` how many ids of each row are predicted; the rest of it is padding.
        nbytes (np.ndarray): ``[N]`` bytes of the text that they stand for.
    """

    ids: np.ndarray
    counts: np.ndarray
    nbytes: np.ndarray


def windows(tokenizer, texts, length=256, count=None) -> Windows:
    """Cut texts into windows of ``length`` predicted tokens. A text starts after the end-of-text id, as in training.

    Args:
        tokenizer (TokenizerWrapper): As ``mlx_lm.load`` returns it.
        texts (list[str]): What to predict.
        length (int): T, ids predicted in a row; those before it in the file are forgotten.
        count (int): Windows to keep, spread evenly. Default: all.
    """
    start = tokenizer.eos_token_id
    rows, counts, nbytes = [], [], []
    for text in texts:
        encoded = tokenizer._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, at = (
            [start, *encoded["input_ids"]],
            [a for a, _ in encoded["offset_mapping"]] + [len(text)],
        )
        for i in range(0, len(ids) - 1, length):
            row = ids[i : i + length + 1]
            rows.append(row + [start] * (length + 1 - len(row)))
            counts.append(len(row) - 1)
            nbytes.append(len(text[at[i] : at[i + len(row) - 1]].encode()))
    if count is not None and count < len(rows):
        keep = np.linspace(0, len(rows) - 1, count).round().astype(int)
        rows, counts, nbytes = ([values[i] for i in keep] for values in (rows, counts, nbytes))
    return Windows(np.array(rows), np.array(counts), np.array(nbytes))


@dataclass(frozen=True)
class Score:
    """The bits that a model needs for each window.

    Attributes:
        bits (np.ndarray): ``[N]``.
        nbytes (np.ndarray): ``[N]``.
    """

    bits: np.ndarray
    nbytes: np.ndarray

    @property
    def bits_per_byte(self) -> float:
        return float(self.bits.sum() / self.nbytes.sum())

    def interval(self, level=0.95, resamples=2000, seed=0) -> tuple[float, float]:
        """Where the bits per byte of such text lie: a bootstrap over windows."""
        drawn = np.random.default_rng(seed).integers(0, len(self.bits), (resamples, len(self.bits)))
        return _quantiles(self.bits[drawn].sum(1) / self.nbytes[drawn].sum(1), level)

    def increase(
        self, base: "Score", level=0.95, resamples=2000, seed=0
    ) -> tuple[float, float, float]:
        """How many more bits than ``base`` on the same windows, as a share: (value, low, high).

        Windows are drawn in pairs, so that hard text, hard for both, does not widen the interval.
        """
        if not np.array_equal(self.nbytes, base.nbytes):
            raise ValueError("expected two scores of the same windows")
        drawn = np.random.default_rng(seed).integers(0, len(self.bits), (resamples, len(self.bits)))
        low, high = _quantiles(self.bits[drawn].sum(1) / base.bits[drawn].sum(1) - 1, level)
        return float(self.bits.sum() / base.bits.sum() - 1), low, high


def _quantiles(values, level):
    return tuple(float(q) for q in np.quantile(values, ((1 - level) / 2, (1 + level) / 2)))


def score(model, some: Windows, batch=4, progress=None) -> Score:
    """The bits that ``model`` needs for every window.

    Args:
        model (nn.Module): From ``moelab.load`` or ``mlx_lm.load``.
        some (Windows): The text.
        batch (int): B, windows in one call.
        progress (tqdm): Moved on by every token.
    """
    bits = []
    for i in range(0, len(some.ids), batch):
        ids, counts = mx.array(some.ids[i : i + batch]), mx.array(some.counts[i : i + batch])
        logits = model(ids[:, :-1]).astype(mx.float32)
        nats = nn.losses.cross_entropy(logits, ids[:, 1:], reduction="none")
        kept = mx.arange(nats.shape[1]) < counts[:, None]
        bits += ((nats * kept).sum(1) / np.log(2)).tolist()
        if progress is not None:
            progress.update(int(counts.sum()))
    return Score(np.array(bits), some.nbytes)


def xz_bits_per_byte(texts) -> float:
    """What ``xz -9e`` needs for the same text, all of it in one piece: a yardstick that knows nothing."""
    whole = "".join(texts).encode()
    return 8 * len(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME)) / len(whole)


def at_top_k(
    path, texts, ks, config=None, length=256, count=16, batch=4, progress=True
) -> dict[int, Score]:
    """Score a streamed model on the same windows for several top-k.

    Args:
        path (str or Path): A model folder.
        texts (list[str]): Held-out text.
        ks (list[int]): Values of K.
        config (StreamConfig): Everything else. Default: ``StreamConfig()``.
        length, count, batch (int): As for ``windows`` and ``score``.
        progress (bool): Show a bar.
    """
    scores, some = {}, None
    bar = None
    for k in ks:
        model, tokenizer = load(path, dataclasses.replace(config or StreamConfig(), top_k=k))
        with model:
            if some is None:
                some = windows(tokenizer, texts, length, count)
                total = int(some.counts.sum()) * len(ks)
                bar = tqdm(
                    total=total,
                    desc="bits per byte",
                    unit="token",
                    leave=False,
                    disable=not progress,
                )
            scores[k] = score(model, some, batch, bar)
    if bar is not None:
        bar.close()
    return scores

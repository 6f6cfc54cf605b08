"""Bits per byte of a checkpoint on its held-out text, beside ``xz -9e``, and each expert's share.

    python data/recipes/evaluate.py data/models/tiny-moe

Needs mlx-lm and moelab.
"""

import lzma
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np

from moelab.hooks import hooked
from moelab.lab import quality
from moelab.lab.texts import heldout_files

WINDOW = 2048  # tokens; no context crosses a window


class Tally:
    """A hook for the call of a ``SwitchGLU``: counts the choices, computes one expert at a time.

    The weights are the checkpoint's own, dequantized: on a CPU a thousand tokens then share one
    dense product, where ``gather_qmm`` would read the expert again for each token.
    """

    def __init__(self, experts):
        self.experts = experts
        self.kept = None  # bool [B, T]: which positions are text and not padding
        self.counts = np.zeros(experts.gate_proj.num_experts, np.int64)

    def __call__(self, original, x, indices):
        chosen = np.array(indices)
        self.counts += np.bincount(chosen[self.kept].ravel(), minlength=len(self.counts))
        flat = chosen.ravel()
        order = np.argsort(flat, kind="stable")
        ends = np.searchsorted(flat[order], np.arange(len(self.counts) + 1))
        x = x.reshape(-1, x.shape[-1])[mx.array(order // chosen.shape[-1])]
        parts = [self._expert(e, x[a:b]) for e, (a, b) in enumerate(pairwise(ends)) if a < b]
        return mx.concatenate(parts)[mx.array(np.argsort(order))].reshape(*chosen.shape, -1)

    def _expert(self, e, x):
        def linear(p, x):
            return x @ mx.dequantize(p.weight[e], p.scales[e], p.biases[e], p.group_size, p.bits).T

        m = self.experts
        return linear(m.down_proj, m.activation(linear(m.up_proj, x), linear(m.gate_proj, x)))


def evaluate(model, tokenizer, texts, batch: int = 8) -> tuple[float, np.ndarray]:
    """Bits per byte of ``texts``, and each expert's share of the tokens, [L, E].

    Each text is read from its own start, ``batch`` windows at a time.
    """
    rows = quality.windows(tokenizer, texts, WINDOW)
    rows = rows[np.argsort(-rows.counts, kind="stable")]  # similar lengths together: less padding
    tallies, bits = [Tally(layer.mlp.switch_mlp) for layer in model.layers], 0.0
    with ExitStack() as hooks:
        for tally in tallies:
            hooks.enter_context(hooked(tally.experts, tally))
        for i in range(0, len(rows), batch):
            part = rows[i : i + batch]
            for tally in tallies:
                tally.kept = np.arange(part.counts.max()) < part.counts[:, None]
            bits += quality.score(model, part, batch).sum()
    shares = np.stack([tally.counts for tally in tallies]) / rows.counts.sum()
    return float(bits / rows.nbytes.sum()), shares


def main(model_path):
    path = Path(model_path)
    model, tokenizer = mlx_lm.load(str(path))
    if mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)  # half precision is emulated there
    texts = list(heldout_files(path / "heldout").values())
    bpb, shares = evaluate(model, tokenizer, texts)
    whole = "".join(texts).encode()
    packed = lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME)
    xz = 8 * len(packed) / len(whole)  # bits per byte in one stream: a baseline without training
    even = shares.sum(1).mean() / shares.shape[1]
    print(f"{len(texts)} files, {sum(len(t.encode()) for t in texts)} bytes")
    print(f"bits per byte: {bpb:.4f}   xz -9e: {xz:.4f}")
    print(f"share of tokens that use an expert (even: {even:.4f})")
    for layer, (a, b) in enumerate(zip(shares.max(1), shares.min(1))):
        print(f"  layer {layer}: most used {a:.4f}   least used {b:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

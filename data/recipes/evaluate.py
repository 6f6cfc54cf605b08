"""Bits per byte of a checkpoint on the held-out text, beside ``xz -9e``, and how its routing spreads.

python data/recipes/evaluate.py data/models/tiny-moe
"""

import argparse
import json
import lzma
import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np

WINDOW = 2048  # tokens; no context crosses a window


def heldout_files(model_dir):
    """The held-out files of a model, sorted by name."""
    return sorted(p for p in (Path(model_dir) / "heldout").iterdir() if p.suffix in (".py", ".md"))


def xz_bits_per_byte(texts):
    """What ``xz -9e`` needs for all texts in one stream, in bits for each byte."""
    data = "".join(texts).encode()
    packed = lzma.compress(
        data, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, preset=9 | lzma.PRESET_EXTREME
    )
    return 8 * len(packed) / len(data)


def windows(tokenizer, texts, length=WINDOW):
    """Every token once as a target, each text after an end-of-text token of its own.

    Args:
        tokenizer: The model's tokenizer.
        texts (list[str]): Texts.
        length (int): Most targets in a window.

    Returns:
        list[np.ndarray]: Token ids, at most ``length + 1`` each, the longest first.
    """
    rows = []
    for text in texts:
        ids = [tokenizer.eos_token_id] + tokenizer.encode(text, add_special_tokens=False)
        rows += [np.array(ids[i : i + length + 1]) for i in range(0, len(ids) - 1, length)]
    return sorted(rows, key=len, reverse=True)


class Experts(nn.Module):
    """Stands in for a ``SwitchGLU`` over many tokens: counts the choices, and multiplies one expert at a time.

    The weights are the checkpoint's own, dequantized: on a CPU a thousand tokens share one dense product so, where
    ``gather_qmm`` would read the expert again for each token.
    """

    def __init__(self, inner):
        super().__init__()
        self._inner = inner
        self.kept = None  # bool [B, T]: which positions are text and not padding
        self.counts = np.zeros(inner.gate_proj.num_experts, np.int64)

    def __call__(self, x, indices):
        chosen = np.array(indices)
        self.counts += np.bincount(chosen[self.kept].ravel(), minlength=len(self.counts))
        flat = chosen.ravel()
        order = np.argsort(flat, kind="stable")
        ends = np.searchsorted(flat[order], np.arange(len(self.counts) + 1))
        x = x.reshape(-1, x.shape[-1])[mx.array(order // chosen.shape[-1])]
        parts = [self._expert(e, x[a:b]) for e, (a, b) in enumerate(zip(ends, ends[1:])) if a < b]
        return mx.concatenate(parts)[mx.array(np.argsort(order))].reshape(*chosen.shape, -1)

    def _expert(self, e, x):
        def linear(p, x):
            return x @ mx.dequantize(p.weight[e], p.scales[e], p.biases[e], p.group_size, p.bits).T

        inner = self._inner
        return linear(
            inner.down_proj, inner.activation(linear(inner.up_proj, x), linear(inner.gate_proj, x))
        )


def evaluate(model, tokenizer, texts, batch=8):
    """Bits per byte of ``texts`` and each expert's share of the tokens.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        texts (list[str]): Each is read from its own start.
        batch (int): B, windows at a time.

    Returns:
        tuple[float, np.ndarray]: Bits per byte, and shares [L, E].
    """
    rows = windows(tokenizer, texts)
    nats, tokens = 0.0, 0
    blocks = [layer.mlp for layer in model.layers]
    experts = [Experts(block.switch_mlp) for block in blocks]
    try:
        for block, expert in zip(blocks, experts):
            block.switch_mlp = expert
        for i in range(0, len(rows), batch):
            some = rows[i : i + batch]
            ids = np.zeros((len(some), len(some[0])), np.int32)
            kept = np.zeros((len(some), len(some[0]) - 1), bool)
            for row, keep, text in zip(ids, kept, some):
                row[: len(text)] = text
                keep[: len(text) - 1] = True
            for expert in experts:
                expert.kept = kept
            logits = model(mx.array(ids[:, :-1])).astype(mx.float32)
            loss = nn.losses.cross_entropy(logits, mx.array(ids[:, 1:]))
            nats += float((loss * mx.array(kept)).sum())
            tokens += int(kept.sum())
    finally:
        for block, expert in zip(blocks, experts):
            block.switch_mlp = expert._inner
    shares = np.stack([expert.counts for expert in experts]) / tokens
    return nats / math.log(2) / sum(len(t.encode()) for t in texts), shares


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--files", type=int, default=None, help="only the first so many held-out files"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures here too")
    args = parser.parse_args()

    model, tokenizer = mlx_lm.load(str(args.model))
    if mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)  # half precision is emulated there
    texts = [p.read_text(encoding="utf-8") for p in heldout_files(args.model)[: args.files]]
    bpb, shares = evaluate(model, tokenizer, texts)
    xz = xz_bits_per_byte(texts)
    most, least = shares.max(1), shares.min(1)
    print(f"{len(texts)} files, {sum(len(t.encode()) for t in texts)} bytes")
    print(f"bits per byte: {bpb:.4f}   xz -9e: {xz:.4f}")
    print(
        f"share of tokens that use an expert (even: {shares.sum(1).mean() / shares.shape[1]:.4f})"
    )
    for layer, (a, b) in enumerate(zip(most, least)):
        print(f"  layer {layer}: most used {a:.4f}   least used {b:.4f}")
    if args.json:
        figures = {"bpb": bpb, "xz_bpb": xz, "most": most.tolist(), "least": least.tolist()}
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

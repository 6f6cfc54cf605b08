"""Print the bits per byte of held-out text by a model and by ``xz -9e``, and experts' shares.

    python data/recipes/evaluate.py data/models/tiny-moe

An expert's share is the share of tokens that use the expert.
"""

import lzma
import sys
from pathlib import Path

import moelab
from moelab.lab import quality
from moelab.lab.texts import heldout_files
from moelab.replay.locality import popularity

WINDOW = 2048  # tokens; the model reads nothing before a window


def evaluate(path, texts):
    """Compute bits per byte of ``texts``, and each expert's share of the tokens, [L, E].

    Each text is read from its own start.
    """
    model, tokenizer = moelab.load(path, moelab.StreamConfig(mode="resident"))
    rows = quality.windows(tokenizer, texts, WINDOW)
    with model, moelab.record(model) as trace:
        bits = quality.score(model, rows, batch=1).sum()
    return float(bits / rows.nbytes.sum()), popularity(trace)


def main(path):
    texts = list(heldout_files(Path(path) / "heldout").values())
    bpb, shares = evaluate(path, texts)
    whole = "".join(texts).encode()
    packed = lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME)
    xz = 8 * len(packed) / len(whole)  # bits per byte in one stream: a baseline without training
    even = shares.sum(1).mean() / shares.shape[1]
    print(f"{len(texts)} files, {len(whole)} bytes")
    print(f"bits per byte: {bpb:.4f}   xz -9e: {xz:.4f}")
    print(f"share of tokens that use an expert (even: {even:.4f})")
    for layer, (a, b) in enumerate(zip(shares.max(1), shares.min(1))):
        print(f"  layer {layer}: most used {a:.4f}   least used {b:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

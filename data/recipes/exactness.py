"""Compare streamed passes of many lengths with the resident model's, bit for bit.

    python data/recipes/exactness.py OUT.json MODEL stacked,fused SLOTS

It is meant for a GPU: there the number of rows decides which kernel MLX takes, and so how MLX
rounds.
"""

import random
import sys

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from moelab import StreamConfig, load
from moelab.lab import records
from moelab.lab.arguments import parse_modes
from moelab.lab.models import folder
from moelab.lab.texts import heldout_code
from moelab.lab.variants import resident_like

SIZES = (1, 2, 4, 8, 16, 40, 160)  # tokens of a pass


def soak(path, config, passes=334, sizes=SIZES):
    """Compare the logits of many passes of random length with the resident model's."""
    resident, tokenizer = load(path, resident_like(config))
    model, _ = load(path, config)
    ids = [t for text in heldout_code(path).values() for t in tokenizer.encode(text)]
    by_size = {T: [0, 0] for T in sizes}
    rng, at = random.Random(config.slots), 0
    with resident, model:
        for i in range(passes):
            if i % 25 == 0:  # begin another text
                caches = [make_prompt_cache(m) for m in (model, resident)]
            T = rng.choice(sizes)
            inputs, at = mx.array([ids[at : at + T]]), (at + T) % (len(ids) - max(sizes))
            y, want = (m(inputs, cache=c) for m, c in zip((model, resident), caches))
            by_size[T][0] += 1
            by_size[T][1] += mx.array_equal(y, want).item()
    return [
        {"what": "random passes", "positions": T, "n": n, "equal": equal}
        for T, (n, equal) in by_size.items()
    ]


def main(out, path, modes, slots):
    path, rows = folder(path), []
    running = records.Running("exactness", {"model": path.name})
    for name, config in parse_modes(modes, StreamConfig(slots=int(slots))).items():
        facts = {"variant": name, "slots": config.slots, "source": config.source}
        rows += [facts | row for row in soak(path, config)]
    records.print_and_save("", running.table(rows), out)


if __name__ == "__main__":
    main(*sys.argv[1:])

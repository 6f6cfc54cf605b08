"""Does a model's memory stay what ``footprint`` predicts while it writes a long text?

    python data/recipes/memory.py OUT.json MODEL SLOTS TOKENS RUNS

The record is the evidence for claim A10 of docs/scorecard.md. Each run has a process of its own.
"""

import sys
from dataclasses import asdict

import mlx.core as mx
import psutil
from mlx_lm.models.cache import make_prompt_cache

from moelab import StreamConfig, footprint, load
from moelab.lab import limit, records
from moelab.lab.models import folder
from moelab.lab.texts import PROMPTS


def counts(path, slots, tokens):
    """Decode a long greedy text in this process; measure memory every few tokens."""
    model, tokenizer = load(path, StreamConfig(slots=slots))
    rows, swapped = [], psutil.swap_memory().sout
    with model:
        cache, y = make_prompt_cache(model), mx.array(tokenizer.encode(PROMPTS[0]))
        for i in range(tokens + 1):
            y = mx.argmax(model(y[None], cache=cache)[:, -1], axis=-1)
            mx.eval(y)
            if i % max(1, tokens // 16) == 0:
                row = {
                    "tokens": i,
                    "active_nbytes": mx.get_active_memory(),
                    "peak_nbytes": mx.get_peak_memory(),
                    "rss_nbytes": psutil.Process().memory_info().rss,
                    "swapped_nbytes": psutil.swap_memory().sout - swapped,
                }
                rows.append(row)
                mx.reset_peak_memory()
    return rows


def main(out, path, slots, tokens, runs="1"):
    path, slots, tokens, rows = folder(path), int(slots), int(tokens), []
    config = StreamConfig(slots=slots)
    settings = {"model": path.name, "tokens": tokens, "config": asdict(config)}
    settings |= {"predicted_nbytes": footprint(path, config).total_nbytes}
    running = records.Running("memory", settings)
    for i in range(int(runs)):
        found, _ = limit.call(counts, path, slots, tokens, what=f"run {i}")
        rows += [{"variant": config.mode, "round": i} | row for row in found]
    made = running.table(rows)
    records.print_and_save(made.groupby("tokens").median(numeric_only=True).to_string(), made, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

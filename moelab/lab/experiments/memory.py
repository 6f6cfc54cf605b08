"""Does a model's memory stay what ``footprint`` predicts while it writes a long text?

python -m moelab.lab memory OUT.json MODEL SLOTS TOKENS RUNS
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import psutil
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, footprint, load
from .. import limit, records
from ..models import folder
from ..texts import PROMPTS

if TYPE_CHECKING:
    from pandas import DataFrame

COUNTS = 16  # counts of a run after the first one


def measure(
    path: str | Path,
    config: StreamConfig,
    tokens: int = 256,
    every: int = 32,
    runs: int = 1,
    prompt: str = PROMPTS[0],
) -> "DataFrame":
    """Measure memory every few tokens of long greedy texts, each in a process of its own."""
    path, rows = folder(path), []
    settings = {
        "model": path.name,
        "tokens": tokens,
        "config": asdict(config),
        "predicted_nbytes": footprint(path, config).total_nbytes,
    }
    running = records.Running("memory", settings)
    for i in range(runs):
        made, _ = limit.call(counts, path, config, tokens, every, prompt, what="memory")
        rows += [{"variant": config.mode, "round": i} | row for row in made]
    return running.table(rows)


def counts(path: str, config: dict, tokens: int, every: int, prompt: str) -> list[dict[str, Any]]:
    """Make one run of ``measure``, for ``limit.call``, and return the rows of its counts."""
    model, tokenizer = load(path, StreamConfig(**config))
    out, swapped = [], psutil.swap_memory().sout
    with model:
        cache, y = make_prompt_cache(model), mx.array(tokenizer.encode(prompt))
        for i in range(tokens + 1):
            y = mx.argmax(model(y[None], cache=cache)[:, -1], axis=-1)
            mx.eval(y)
            if i % every == 0:
                out.append(
                    {
                        "tokens": i,
                        "active_nbytes": mx.get_active_memory(),
                        "peak_nbytes": mx.get_peak_memory(),
                        "rss_nbytes": psutil.Process().memory_info().rss,
                        "swapped_nbytes": psutil.swap_memory().sout - swapped,
                    }
                )
                mx.reset_peak_memory()
    return out


def main(out: str, path: str, slots: str, tokens: str, runs: str) -> None:
    """Measure a model with ``slots`` and save the record."""
    config, tokens = StreamConfig(slots=int(slots)), int(tokens)
    made = measure(path, config, tokens, max(1, tokens // COUNTS), int(runs))
    records.print_and_save(made.groupby("tokens").median(numeric_only=True).to_string(), made, out)

"""How near the logits of a streamed model are to the resident model's.

    python -m moelab.lab exactness OUT.json MODEL serial,buffers,stacked,fused SLOTS

On the CPU backend the tests show that they are equal. On a GPU the number of rows decides which
kernel MLX takes and so how it rounds.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, load
from .. import records
from ..arguments import parse_modes
from ..models import folder
from ..texts import PROMPTS
from ..variants import resident_like

if TYPE_CHECKING:
    from pandas import DataFrame


def agreement(
    path: str | Path,
    modes: str = "serial,buffers,stacked,fused",
    base: StreamConfig | None = None,
    tokens: int = 32,
    prompt: str = PROMPTS[0],
) -> "DataFrame":
    """Compare every mode's logits with the resident model's, behind its greedy tokens.

    Errors are the largest difference of a logit over the logits' standard deviation.
    """
    path = folder(path)
    configs = {"resident": resident_like(base), **parse_modes(modes, base)}
    dtype, rows, baseline, ids = (base or StreamConfig()).dtype, [], None, None
    running = records.Running("agreement", {"model": path.name, "tokens": tokens})
    for name, config in configs.items():
        model, tokenizer = load(path, config)
        with model:
            prompt_ids = tokenizer.encode(prompt)
            cache = make_prompt_cache(model)
            logits = [
                np.array(model(mx.array([prompt_ids]), cache=cache)[0, -1].astype(mx.float32))
            ]
            for i in range(tokens):
                y = int(logits[-1].argmax()) if baseline is None else ids[i]
                logits.append(
                    np.array(model(mx.array([[y]]), cache=cache)[0, -1].astype(mx.float32))
                )
        logits = np.stack(logits)
        if baseline is None:
            baseline, ids = logits, logits.argmax(1).tolist()
            continue
        error = np.abs(logits - baseline).max(1) / baseline.std(1)
        rows.append(
            {
                "variant": name,
                "dtype": dtype,
                "prefill_error": float(error[0]),
                "decode_error": float(error[1:].max()),
                "bit_for_bit": bool((logits == baseline)[1:].all()),
                "same_tokens": float((logits.argmax(1) == baseline.argmax(1)).mean()),
            }
        )
    return running.table(rows)


def main(out: str, path: str, modes: str, slots: str) -> None:
    """Compare modes in float32 and in the file's type, and save the record."""
    base, dtypes = StreamConfig(slots=int(slots)), ("float32", "auto")
    made = [agreement(path, modes, replace(base, dtype=dtype)) for dtype in dtypes]
    made = records.together(dict(zip(dtypes, made)), "dtype")
    records.print_and_save(made.to_string(), made, out)

"""Is a streamed pass a function of its inputs, and is it the resident model's, bit for bit?

On the CPU backend the tests show that it is. On a GPU the number of rows decides which kernel MLX
takes and so how it rounds.

    python -m moelab.lab exactness OUT.json agreement MODEL serial,buffers,stacked,fused SLOTS
    python -m moelab.lab exactness OUT.json passes MODEL stacked,fused SLOTS
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, load
from ...speculation.drafts import LookupDraft
from ...speculation.generate import speculative_generate_step
from .. import records
from ..arguments import parse_modes
from ..models import folder
from ..texts import PROMPTS, heldout_code
from .bench import resident_like

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


def texts(
    path: str | Path,
    config: StreamConfig,
    make_draft: Callable[[], Any],
    drafts: Sequence[int] = (0, 4, 8),
    n: int = 20,
    tokens: int = 64,
    written: dict[int, list[list[int]]] | None = None,
) -> list[dict[str, Any]]:
    """Write greedy texts twice, with others between, and compare them with the resident model's.

    For each number of ``drafts`` (0: mlx-lm's own loop): how many of n texts are ``equal`` to the
    resident model's with as many drafts, ``repeated`` word by word, ``equal_undrafted`` to the
    resident model's without; ``resident_undrafted``: how many it writes alike with and without.
    ``written`` keeps the resident model's texts between calls.
    """
    resident, tokenizer = load(path, resident_like(config))
    model, _ = load(path, config)
    files = [tokenizer.encode(t) for t in heldout_code(path).values()]
    prompts = [ids[: 40 + 7 * (i % 10)] for i, ids in enumerate(files * n)][:n]
    out, written = [], {} if written is None else written
    with resident, model:
        for k in {0, *drafts} - written.keys():
            draft = make_draft() if k else None
            written[k] = [_write(resident, p, k, draft, tokens) for p in prompts]
        for k in drafts:
            write = partial(_write, drafts=k, draft=make_draft() if k else None, tokens=tokens)
            first = [write(model, p) for p in prompts]
            again = [write(model, p) for p in prompts[::-1]][::-1]
            pairs = {
                "equal": (first, written[k]),
                "repeated": (first, again),
                "equal_undrafted": (first, written[0]),
                "resident_undrafted": (written[k], written[0]),
            }
            row = {"what": "greedy texts", "drafts": k, "n": len(prompts), "tokens": tokens}
            same = {key: sum(x == y for x, y in zip(*pair)) for key, pair in pairs.items()}
            out.append(row | same)
    return out


def soak(
    path: str | Path,
    config: StreamConfig,
    passes: int = 334,
    tokens: int = 3334,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 40, 160),
    passes_a_cache: int = 25,
    tokens_a_text: int = 250,
) -> list[dict[str, Any]]:
    """Compare many passes of random length, then many greedy texts, with the resident model's."""
    resident, tokenizer = load(path, resident_like(config))
    model, _ = load(path, config)
    ids = [t for text in heldout_code(path).values() for t in tokenizer.encode(text)]
    by_size = {T: [0, 0] for T in sizes}
    rng, at = random.Random(config.slots), 0
    with resident, model:
        for i in range(passes):
            if i % passes_a_cache == 0:
                caches = [make_prompt_cache(m) for m in (model, resident)]
            T = rng.choice(sizes)
            inputs, at = mx.array([ids[at : at + T]]), (at + T) % (len(ids) - max(sizes))
            y, want = (m(inputs, cache=c) for m, c in zip((model, resident), caches))
            by_size[T][0] += 1
            by_size[T][1] += mx.array_equal(y, want).item()
        texts, wrote = [], 0
        while wrote < tokens:
            begin = rng.randrange(len(ids) - 50)
            prompt, n = ids[begin : begin + 40 + len(texts) % 7], min(tokens_a_text, tokens - wrote)
            got, want = (_write(m, prompt, 0, None, n) for m in (model, resident))
            texts, wrote = [*texts, got == want], wrote + len(got)
    rows = [
        {"what": "random passes", "positions": T, "n": n, "equal": equal}
        for T, (n, equal) in by_size.items()
    ]
    text = {"what": "long texts", "n": len(texts), "equal": sum(texts), "tokens": wrote}
    return [*rows, text]


def passes(
    path: str | Path, modes: str = "stacked,fused", base: StreamConfig | None = None
) -> "DataFrame":
    """The rows of ``texts``, with drafts looked up in the text, and of ``soak``, for every mode."""
    path, rows, written = folder(path), [], {}
    running = records.Running("exactness", {"model": path.name})
    for name, config in parse_modes(modes, base).items():
        facts = {"variant": name, "slots": config.slots, "source": config.source}
        made = texts(path, config, LookupDraft, written=written) + soak(path, config)
        rows += [facts | row for row in made]
    return running.table(rows)


def _write(model, prompt, drafts, draft, tokens):
    prompt = mx.array(prompt)
    if not drafts:
        return [t for t, _ in generate_step(prompt, model, max_tokens=tokens)]
    steps = speculative_generate_step(
        prompt, model, draft, num_draft_tokens=drafts, max_tokens=tokens
    )
    return [t for t, *_ in steps]


def main(out: str, what: str, path: str, modes: str, slots: str) -> None:
    """Measure ``agreement`` or ``passes`` and save the record."""
    if what not in ("agreement", "passes"):
        raise ValueError(f"expected agreement or passes, got {what!r}")
    base = StreamConfig(slots=int(slots))
    if what == "passes":
        made = passes(path, modes, base)
    else:
        dtypes = "float32", "auto"
        made = [agreement(path, modes, replace(base, dtype=dtype)) for dtype in dtypes]
        made = records.together(dict(zip(dtypes, made)), "dtype")
    records.print_and_save(made.to_string(), made, out)

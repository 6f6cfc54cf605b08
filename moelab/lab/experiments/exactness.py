"""Is a streamed pass a function of its inputs, and is it the resident model's, bit for bit?

On the CPU backend the tests show that it is. On a GPU the number of rows decides which kernel MLX
takes and so how it rounds; ``python data/recipes/cuda_run.py`` measures what is true there.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, load
from ...commands.stream_options import parse_modes
from ...speculation.generate import speculative_generate_step
from .. import machine
from ..models import folder
from ..texts import PROMPTS, heldout_code
from .bench import resident_like


def agreement(
    path: str | Path,
    modes: str = "serial,buffers,stacked,fused",
    base: StreamConfig | None = None,
    tokens: int = 32,
    prompt: str = PROMPTS[0],
) -> dict[str, Any]:
    """How near every mode's logits are to the resident model's.

    All are fed the resident model's greedy tokens.

    Args:
        path (str or Path): The model.
        modes (str): As for ``parse_modes``.
        base (StreamConfig): What the modes have in common.
        tokens (int): Decoded.
        prompt (str): Before them.

    Returns:
        dict: By mode: ``prefill_error`` and ``decode_error``, the largest difference of a logit
        over the standard deviation of the logits; ``same_tokens``, the share of steps with the
        same best token; ``bit_for_bit`` of the decoded steps.
    """
    path = folder(path)
    configs = {"resident": resident_like(base), **parse_modes(modes, base)}
    out, baseline, ids = {}, None, None
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
        out[name] = {
            "prefill_error": float(error[0]),
            "decode_error": float(error[1:].max()),
            "bit_for_bit": bool((logits == baseline)[1:].all()),
            "same_tokens": float((logits.argmax(1) == baseline.argmax(1)).mean()),
        }
    return {
        "kind": "agreement",
        "machine": machine.card(),
        "dtype": (base or StreamConfig()).dtype,
        "tokens": tokens,
        "modes": out,
    }


def chunks(
    path: str | Path,
    config: StreamConfig,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 40, 160),
    histories: Sequence[int] = (1, 200, 40),
) -> list[dict[str, Any]]:
    """Logits of a text fed in chunks, after other text in other chunks, against the resident model.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig): How to stream.
        sizes (Sequence[int]): T of the passes that are compared.
        histories (Sequence[int]): T of the passes over another text after each run.

    Returns:
        list[dict]: For each T the largest difference to resident in each run, and whether the
        runs are equal among themselves.
    """
    resident, tokenizer = load(path, resident_like(config))
    files = [tokenizer.encode(t) for t in heldout_code(path).values()]
    text, other = files[0][:160], files[1][:200]
    want = {T: _logits(resident, text, T) for T in sizes}
    model, _ = load(path, config)
    out = []
    with resident, model:
        for T in sizes:
            runs = []
            for history in histories:
                runs.append(_logits(model, text, T))
                _logits(model, other, history)
            off = [float(np.abs(run - want[T]).max()) for run in runs]
            same = all(np.array_equal(run, runs[0]) for run in runs)
            out.append({"T": T, "off": off, "runs_equal": same})
    return out


def _logits(model, ids, T):
    cache, out = make_prompt_cache(model), []
    for i in range(0, len(ids), T):
        y = model(mx.array([ids[i : i + T]]), cache=cache)[0].astype(mx.float32)
        out.append(np.array(y))
    return np.concatenate(out)


def texts(
    path: str | Path,
    config: StreamConfig,
    make_draft: Callable[[], Any],
    drafts: Sequence[int] = (0, 4, 8),
    n: int = 20,
    tokens: int = 64,
) -> list[dict[str, Any]]:
    """Greedy texts, each written twice with others between, and by the resident model.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig): How to stream.
        make_draft (Callable): Gives a draft.
        drafts (Sequence[int]): Numbers of tokens drafted in a round; 0: mlx-lm's own loop.
        n (int): Prompts, from held-out files.
        tokens (int): Tokens of each.

    Returns:
        list[dict]: For each number of drafts, how many of the n texts are the same twice, the
        same as resident with as many drafts, and the same as resident with none.
    """
    resident, tokenizer = load(path, resident_like(config))
    model, _ = load(path, config)
    files = [tokenizer.encode(t) for t in heldout_code(path).values()]
    prompts = [ids[: 40 + 7 * (i % 10)] for i, ids in enumerate(files * n)][:n]
    out = []
    with resident, model:
        undrafted = [_write(resident, p, 0, None, tokens) for p in prompts]
        for k in drafts:
            begin = time.perf_counter()
            write = partial(_write, drafts=k, draft=make_draft() if k else None, tokens=tokens)
            first = [write(model, p) for p in prompts]
            again = [write(model, p) for p in prompts[::-1]][::-1]
            as_resident = [write(resident, p) for p in prompts]
            out.append(
                {
                    "drafts": k,
                    "n": len(prompts),
                    "tokens": tokens,
                    "twice": _same(first, again),
                    "as_resident": _same(first, as_resident),
                    "as_resident_undrafted": _same(first, undrafted),
                    "resident_as_undrafted": _same(as_resident, undrafted),
                    "seconds": time.perf_counter() - begin,
                }
            )
    return out


def soak(
    path: str | Path,
    config: StreamConfig,
    passes: int = 334,
    tokens: int = 3334,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 40, 160),
    passes_a_cache: int = 25,
    tokens_a_text: int = 250,
) -> dict[str, Any]:
    """Many passes of random length over held-out text, then many greedy texts, against resident.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig): How to stream.
        passes (int): Passes whose logits are compared.
        tokens (int): Tokens decoded in all texts together, at least.
        sizes (Sequence[int]): T of the passes, drawn at random.
        passes_a_cache (int): Passes before the caches are new.
        tokens_a_text (int): The most that a text has.

    Returns:
        dict: ``passes`` and how many are ``equal``, ``by_size`` the same for each T, ``tokens``,
        ``texts`` and ``texts_equal``.
    """
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
        wrote = texts_equal = texts = 0
        while wrote < tokens:
            begin = rng.randrange(len(ids) - 50)
            prompt, n = ids[begin : begin + 40 + texts % 7], min(tokens_a_text, tokens - wrote)
            got, want = (_write(m, prompt, 0, None, n) for m in (model, resident))
            texts, texts_equal, wrote = texts + 1, texts_equal + (got == want), wrote + len(got)
    return {
        "passes": passes,
        "equal": sum(equal for _, equal in by_size.values()),
        "by_size": by_size,
        "tokens": wrote,
        "texts": texts,
        "texts_equal": texts_equal,
    }


def _same(a, b):
    return sum(x == y for x, y in zip(a, b))


def _write(model, prompt, drafts, draft, tokens):
    prompt = mx.array(prompt)
    if not drafts:
        return [t for t, _ in generate_step(prompt, model, max_tokens=tokens)]
    steps = speculative_generate_step(
        prompt, model, draft, num_draft_tokens=drafts, max_tokens=tokens
    )
    return [t for t, *_ in steps]

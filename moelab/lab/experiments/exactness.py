"""Is a streamed pass a function of its inputs, and is it the resident model's, bit for bit?

On the CPU backend the tests settle this. On a GPU the number of rows decides which kernel MLX takes
and so how it rounds: what is true there is measured, by ``python data/recipes/cuda_run.py``.
"""

import time
from functools import partial

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ... import StreamConfig, load
from ...speculation.generate import speculative_generate_step
from ..texts import heldout_code


def chunks(path, config, sizes=(1, 2, 4, 8, 16, 40, 160), histories=(1, 200, 40)):
    """Logits of a text fed in chunks, after other text in other chunks, against the resident model.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig): How to stream.
        sizes (tuple[int]): T of the passes that are compared.
        histories (tuple[int]): T of the passes over another text after each run.

    Returns:
        list[dict]: For each T the largest difference to resident in each run, and whether the
        runs are equal among themselves.
    """
    resident, tokenizer = load(path, StreamConfig(mode="resident", dtype=config.dtype))
    text, other = (
        ids[:n]
        for ids, n in zip([tokenizer.encode(t) for t in heldout_code(path).values()], (160, 200))
    )
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


def texts(path, config, make_draft, drafts=(0, 4, 8), n=20, tokens=64):
    """Greedy texts, each written twice with others between, and by the resident model.

    Args:
        path (str or Path): A model folder.
        config (StreamConfig): How to stream.
        make_draft (Callable): Gives a draft.
        drafts (tuple[int]): Numbers of tokens drafted in a round; 0: mlx-lm's own loop.
        n (int): Prompts, from held-out files.
        tokens (int): Tokens of each.

    Returns:
        list[dict]: For each number of drafts, how many of the n texts are the same twice, the
        same as resident with as many drafts, and the same as resident with none.
    """
    resident, tokenizer = load(path, StreamConfig(mode="resident", dtype=config.dtype))
    model, _ = load(path, config)
    prompts = [
        ids[: 40 + 7 * (i % 10)]
        for i, ids in enumerate([tokenizer.encode(t) for t in heldout_code(path).values()] * n)
    ][:n]
    out = []
    with resident, model:
        undrafted = [_write(resident, p, 0, None, tokens) for p in prompts]
        for k in drafts:
            begin = time.perf_counter()
            write = partial(_write, drafts=k, draft=make_draft() if k else None, tokens=tokens)
            first = [write(model, p) for p in prompts]
            again = [write(model, p) for p in prompts[::-1]][::-1]
            as_resident = [write(resident, p) for p in prompts]
            out.append({
                "drafts": k, "n": len(prompts), "tokens": tokens,
                "twice": _same(first, again),
                "as_resident": _same(first, as_resident),
                "as_resident_undrafted": _same(first, undrafted),
                "resident_as_undrafted": _same(as_resident, undrafted),
                "seconds": time.perf_counter() - begin,
            })  # fmt: skip
    return out


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

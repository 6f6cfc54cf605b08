"""What a model's caller hands to native code: caches, inputs and parameters of any layout and size.

Each case is drawn from its number. The fast kernels give the result of MLX's kernels, or one
error. For more cases:

    MOELAB_FUZZ=2000 python -m pytest tests/kernels/test_handed_over.py
"""

import copy
import os
import random

import mlx.core as mx
import numpy as np
import pytest
from common import loaded, needs_kernels
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from moelab.kernels import layers, modules

pytestmark = needs_kernels

CASES = int(os.environ.get("MOELAB_FUZZ", 2000))
FAMILIES = "qwen3_5_moe", "qwen3_next", "qwen3_moe", "kimi_linear", "gpt_oss"
PARAMETERS = "norm.weight", "dt_bias", "A_log", "conv1d.weight", "scales", "biases"


def turned(a):
    """The same numbers, with the last two axes swapped in memory."""
    return mx.contiguous(a.swapaxes(-1, -2)).swapaxes(-1, -2) if a.ndim > 1 else every_other(a)


def every_other(a):
    return mx.contiguous(mx.stack([a, a + 1], axis=-1))[..., 0]


def bad_size(a, axis):
    return mx.concatenate([a, a], axis=axis % a.ndim)


SAME = {
    "itself": lambda a: a,
    "lazy": lambda a: a * 1,
    "turned": turned,
    "every other": every_other,
    "a part": lambda a: mx.contiguous(mx.concatenate([a, a]))[: len(a)],
    "backwards": lambda a: mx.contiguous(a[::-1])[::-1],
}
OTHER = {
    "repeated": lambda a: mx.repeat(a[:1], 3, 0),
    "broadcast": lambda a: mx.broadcast_to(a[:1], (3, *a.shape[1:])),
    "two texts": lambda a: mx.repeat(a[:1], 2, 0),
    "one text": lambda a: a[:1],
    "half": lambda a: a.astype(mx.bfloat16),
    "half too": lambda a: a.astype(mx.float16),
    "wide": lambda a: bad_size(a, -1),
    "long": lambda a: bad_size(a, -2),
    "many": lambda a: bad_size(a, 1),
    "narrow": lambda a: a[..., : a.shape[-1] // 2],
}


@pytest.fixture(scope="module")
def pairs(stored):
    """For each family a model with fast kernels, one with MLX's, and caches of 1, 2 and 3 texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "FLOAT_WEIGHTS", 0)
        patch.setattr(layers, "IN_PLACE_NBYTES", 0)
        made = {}
        for family in FAMILIES:
            of = {"path": stored(family), "mode": "resident"}
            fast, mlx = (loaded(**of, kernels=kernels) for kernels in ("fast", "mlx"))
            caches = {}
            for B in (1, 2, 3):
                caches[B] = make_prompt_cache(mlx)
                mx.eval(mlx(mx.arange(5 * B).reshape(B, 5) + 7, cache=caches[B]))
            made[family] = fast, mlx, caches
        yield made


def arrays_of(cache):
    """A cache's arrays, by the names that ``with_arrays`` sets."""
    if isinstance(cache, ArraysCache):
        return dict(enumerate(cache.cache))
    return {name: getattr(cache, name, None) for name in ("keys", "values")}


def with_arrays(caches, arrays):
    """Copies of caches, with these arrays in place of their own."""
    made = [copy.copy(c) for c in caches]
    for new, given in zip(made, arrays):
        vars(new).update({"cache": [*given.values()]} if isinstance(new, ArraysCache) else given)
    return made


def drawn(number, pairs):
    """Draw a case: models, caches, arrays, passes, changed parameters, and all changes in words."""
    draw = random.Random(number)
    family = draw.choice(FAMILIES)
    fast, mlx, caches = pairs[family]
    B = draw.choice((1, 1, 2, 3))
    told, arrays = [family, B], [arrays_of(c) for c in caches[B]]
    changes = SAME if draw.random() < 0.5 else {**SAME, **OTHER}
    for i, given in enumerate(arrays):
        one = draw.choice(list(changes))
        for name, a in given.items():
            how = one if draw.random() < 0.7 else draw.choice(list(changes))
            if a is not None and draw.random() < 0.7:
                given[name] = changes[how](a)
                told.append((i, name, how))
    texts = next((a.shape[0] for g in arrays for a in g.values() if a is not None), B)
    texts = texts if draw.random() < 0.8 else draw.choice((1, 2, 3))
    passes = []
    for _ in range(2):
        T = draw.choice((1, 1, 2, 3, 20))
        tokens = mx.array([[draw.randrange(90) for _ in range(T)] for _ in range(texts)])
        passes.append(turned(tokens) if draw.random() < 0.3 else tokens)
    told.append([p.shape for p in passes])
    changed = {}
    if draw.random() < 0.3:
        names = [name for name, _ in tree_flatten(fast.parameters()) if name.endswith(PARAMETERS)]
        for name in draw.sample(names, 2):
            how = draw.choice(list(changes))
            changed[name] = changes[how]
            told.append((name, how))
    return fast, mlx, caches[B], arrays, passes, changed, told


def complaint(number, pairs):
    """What is wrong with a case, or None."""
    fast, mlx, caches, arrays, passes, changed, told = drawn(number, pairs)
    found = []
    for model in (mlx, fast):
        modules_of, before = dict(model.named_modules()), []
        for name, how in changed.items():
            path, _, key = name.rpartition(".")
            before.append((modules_of[path], key, modules_of[path][key]))
            modules_of[path][key] = how(modules_of[path][key])
        cache = with_arrays(caches, arrays)
        try:
            logits = [model(tokens, cache=cache) for tokens in passes]
            found.append([np.array(a) for a in logits])
        except Exception as e:
            found.append(e)
        for module, key, a in before:
            module[key] = a
    want, got = found
    if isinstance(got, Exception):
        if isinstance(want, Exception) or (isinstance(got, ValueError) and "expected" in str(got)):
            return None
        return f"{told}: {got!r}"
    if isinstance(want, Exception):
        return f"{told}: no error where MLX's kernels give {want!r}"
    for a, b in zip(want, got):
        if a.shape != b.shape or not np.allclose(a, b, rtol=0, atol=1e-2 * a.std(), equal_nan=True):
            return f"{told}: off by {np.abs(a - b).max() if a.shape == b.shape else b.shape}"
    return None


def test_equal_or_one_clear_error(pairs):
    wrong = [c for number in range(CASES) if (c := complaint(number, pairs)) is not None]
    assert not wrong, f"{len(wrong)} of {CASES}:\n" + "\n".join(wrong[:10])

"""What a model's caller hands to native code: caches, inputs and parameters of any layout and size.

The fast kernels give the result of MLX's kernels, or one error. For more cases:

    MOELAB_FUZZ=2000 python -m pytest tests/kernels/test_handed_over.py
"""

import copy
import os

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from common import loaded, needs_kernels
from hypothesis import given, settings
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from moelab.kernels import layers, modules

pytestmark = needs_kernels

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
    for new, own in zip(made, arrays):
        vars(new).update({"cache": [*own.values()]} if isinstance(new, ArraysCache) else own)
    return made


@settings(max_examples=int(os.environ.get("MOELAB_FUZZ", 2000)), derandomize=True)
@given(
    data=st.data(),
    family=st.sampled_from(FAMILIES),
    B=st.sampled_from((1, 1, 2, 3)),
    changes=st.sampled_from((SAME, SAME | OTHER)),
)
def test_equal_or_one_clear_error(pairs, data, family, B, changes):
    fast, mlx, caches = pairs[family]
    how, arrays = st.sampled_from([*changes]), [arrays_of(c) for c in caches[B]]
    for i, own in enumerate(arrays):
        one, other = data.draw(st.tuples(how, how))
        ways = (one,) * 5 + (other,) * 2 + ("itself",) * 3
        for name, a in own.items():
            if a is not None:
                chosen = data.draw(st.sampled_from(ways), f"{i} {name}")
                own[name] = changes[chosen](a)
    texts = next((len(a) for g in arrays for a in g.values() if a is not None), B)
    texts = data.draw(st.sampled_from((texts,) * 12 + (1, 2, 3)), "texts")
    passes = []
    for _ in range(2):
        T = data.draw(st.sampled_from((1, 1, 2, 3, 20)), "tokens")
        tokens = mx.random.randint(0, 90, (texts, T), key=mx.random.key(len(passes)))
        passes.append(data.draw(st.sampled_from((tokens, tokens, turned(tokens)))))
    names = [name for name, _ in tree_flatten(fast.parameters()) if name.endswith(PARAMETERS)]
    some = st.dictionaries(st.sampled_from(names), how, min_size=1, max_size=2)
    changed, found = data.draw(st.just({}) | some, "parameters"), []
    for model in (mlx, fast):
        modules_of, cache = dict(model.named_modules()), with_arrays(caches[B], arrays)
        with pytest.MonkeyPatch.context() as patch:
            for name, way in changed.items():
                path, _, key = name.rpartition(".")
                patch.setitem(modules_of[path], key, changes[way](modules_of[path][key]))
            try:
                logits = [model(tokens, cache=cache) for tokens in passes]
                found.append([np.array(a) for a in logits])
            except Exception as e:
                found.append(e)
    want, got = found
    if isinstance(got, Exception):
        is_clear = isinstance(got, ValueError) and "expected" in str(got)
        assert is_clear or isinstance(want, Exception), repr(got)
        return
    assert not isinstance(want, Exception), f"no error where MLX's kernels give {want!r}"
    for a, b in zip(want, got):
        assert a.shape == b.shape
        assert np.allclose(a, b, rtol=0, atol=1e-2 * a.std(), equal_nan=True)


def test_a_filter_for_one_channel_is_refused_as_by_mlx(pairs, monkeypatch):
    fast, _, _ = pairs["qwen3_5_moe"]
    conv = next(m for name, m in fast.named_modules() if name.endswith("conv1d"))
    monkeypatch.setitem(conv, "weight", conv["weight"][:1])
    with pytest.raises(ValueError, match="groups"):
        conv(mx.zeros((1, 4, 256)))

"""Attention and recurrence are near MLX's, and have the same bits in passes of any length."""

import mlx.core as mx
import pytest
from common import near, needs_kernels
from mlx_lm.models import base
from mlx_lm.models import gated_delta as of_mlx_lm

from moelab.kernels import attention, code, gated_delta, team
from moelab.kernels.attention import eager_attention

pytestmark = needs_kernels

instead = eager_attention(base.scaled_dot_product_attention)


def attend(q, k, v, scale, mask=None, sinks=None):
    return instead(q, k, v, None, scale, mask, sinks)


def inputs(B=1, H=4, Hk=2, Tq=5, Tk=9, D=32, Dv=None, seed=0):
    """Queries, keys and values as a cache holds them: parts of longer buffers."""
    a, b, c = mx.random.split(mx.random.key(seed), 3)
    k = mx.random.normal((B, Hk, Tk + 7, D), key=b)[:, :, :Tk]
    v = mx.random.normal((B, Hk, Tk + 7, Dv or D), key=c)[:, :, :Tk]
    return [mx.random.normal((B, H, Tq, D), key=a), k, v]


def masks(B=1, H=4, Tq=5, Tk=9, **_):
    seen = mx.arange(Tk - Tq, Tk)[:, None] >= mx.arange(Tk)
    window = seen & (mx.arange(Tk - Tq, Tk)[:, None] < mx.arange(Tk) + 3)
    each = mx.random.uniform(shape=(B, H, Tq, Tk), key=mx.random.key(7)) < 0.7
    each[..., 0] = True
    added = mx.where(each, mx.random.normal(each.shape, key=mx.random.key(8)), -mx.inf)
    return [None, "causal", seen, window, each, each[:, :1], added]


SHAPES = [
    dict(),
    dict(Tq=1),
    dict(B=2, Hk=4),
    dict(Hk=1, D=64, Dv=36),
    dict(D=20, Dv=4),
    dict(Tq=70, Tk=150, D=80, Dv=96),
    dict(Tq=3, Tk=3, D=256),
]


@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_mlxs(shape, sinks, monkeypatch):
    arrays = inputs(**shape)
    extra = mx.random.normal((4,), key=mx.random.key(9)) if sinks else None
    for mask in masks(**shape):
        want = mx.fast.scaled_dot_product_attention(*arrays, scale=0.2, mask=mask, sinks=extra)
        got = attend(*arrays, 0.2, mask, extra)
        assert near(got, want)
        with monkeypatch.context() as m:
            m.setattr(attention, "SCORES", 40)  # few rows at once
            assert mx.array_equal(attend(*arrays, 0.2, mask, extra), got)


@pytest.mark.parametrize("threads", (1, 2, 5))
@pytest.mark.parametrize("D", (8, 32, 96))
def test_passes_of_any_length_and_threads_give_the_same_bits(D, threads, monkeypatch):
    T = 23
    q, k, v = inputs(B=2, Tq=T, Tk=T, D=D)
    want = attend(q, k, v, 0.3, "causal")
    monkeypatch.setattr(team, "SHARED_WORK", 0)
    monkeypatch.setattr(code, "num_threads", lambda: threads)
    for parts in ((T,), (1,) * T, (10, 13), (7, 2, 1, 13)):
        at = 0
        for n in parts:
            end = at + n
            seen = mx.arange(at, end)[:, None] >= mx.arange(end)
            for mask in ("causal", seen):
                y = attend(q[:, :, at:end], k[:, :, :end], v[:, :, :end], 0.3, mask)
                assert mx.array_equal(y, want[:, :, at:end])
            at = end


def test_what_does_not_fit_is_mlxs():
    class Quantized:
        bits, group_size = 8, 32

    def same(arrays, cache=None, mask=None):
        def result(f):  # mlx-lm scales the queries in place
            q = mx.array(arrays[0])
            return f(q, *arrays[1:], cache=cache, scale=0.2, mask=mask)

        return mx.array_equal(result(instead), result(base.scaled_dot_product_attention))

    arrays = inputs()
    assert same([a.astype(mx.bfloat16) for a in arrays], mask="causal")
    assert same(inputs(D=6))
    assert same(inputs(Tk=0)) and same(inputs(Tq=0), mask="causal")
    q, k, v = arrays
    assert same([q, mx.quantize(k, 32, 8), mx.quantize(v, 32, 8)], Quantized)


def recurrence(B=1, T=5, Hk=2, Hv=4, Dk=32, Dv=16, vector=False, seed=0):
    keys = mx.random.split(mx.random.key(seed), 6)
    q, k = (mx.random.normal((B, T, Hk, Dk), key=keys[i]) * Dk**-0.5 for i in (0, 1))
    v = mx.random.normal((B, T, Hv, Dv), key=keys[2])
    g = mx.random.uniform(0.7, 1.0, (B, T, Hv, Dk) if vector else (B, T, Hv), key=keys[3])
    beta = mx.random.uniform(0, 1, (B, T, Hv), key=keys[4])
    state = mx.random.normal((B, Hv, Dv, Dk), key=keys[5])
    return [q, k, v, g, beta, state]


@pytest.mark.parametrize("vector", (False, True))
@pytest.mark.parametrize(
    "shape",
    [dict(T=1), dict(T=7), dict(B=3, T=4), dict(Hk=1, Hv=6, Dv=9), dict(Dk=8, Dv=1), dict(Dk=128)],
    ids=str,
)
def test_as_the_loop(shape, vector):
    arrays = recurrence(**shape, vector=vector)
    assert all(map(near, gated_delta.gated_delta(*arrays), of_mlx_lm.gated_delta_ops(*arrays)))
    arrays[-1] = None
    assert all(map(near, gated_delta.gated_delta(*arrays), of_mlx_lm.gated_delta_ops(*arrays)))


@pytest.mark.parametrize("threads", (1, 2, 5))
def test_a_recurrence_in_parts_gives_the_same_bits(threads, monkeypatch):
    *arrays, state = recurrence(B=2, T=9)
    want, last = gated_delta.gated_delta(*arrays, state)
    monkeypatch.setattr(team, "SHARED_WORK", 0)
    monkeypatch.setattr(code, "num_threads", lambda: threads)
    for parts in ((9,), (1,) * 9, (4, 5), (2, 3, 4)):
        s, ys, at = state, [], 0
        for n in parts:
            y, s = gated_delta.gated_delta(*(a[:, at : at + n] for a in arrays), s)
            ys.append(y)
            at += n
        assert mx.array_equal(mx.concatenate(ys, axis=1), want) and mx.array_equal(s, last)


@pytest.mark.parametrize("vector", (False, True))
def test_masked_tokens_leave_the_state(vector):
    """Each row of a batch has the same bits as without the row's masked tokens."""
    *arrays, state = recurrence(B=2, vector=vector)
    mask = mx.array([[True] * 5, [False, False, True, False, True]])
    y, last = gated_delta.gated_delta(*arrays, state, mask)
    wanted = of_mlx_lm.gated_delta_ops(*arrays, state, mask)
    assert near(last, wanted[1])
    for b, kept in enumerate(([0, 1, 2, 3, 4], [2, 4])):
        assert near(y[b, mx.array(kept)], wanted[0][b, mx.array(kept)])
        alone = [a[b : b + 1, mx.array(kept)] for a in arrays]
        y_alone, last_alone = gated_delta.gated_delta(*alone, state[b : b + 1])
        assert mx.array_equal(last[b : b + 1], last_alone)
        assert mx.array_equal(y[b : b + 1, mx.array(kept)], y_alone)


def test_what_does_not_fit_is_the_loops():
    half = [a.astype(mx.bfloat16) for a in recurrence(B=2)[:5]] + recurrence(B=2)[5:]
    for arrays in (recurrence(Dk=12), half):
        want = of_mlx_lm.gated_delta_ops(*arrays)
        assert all(map(mx.array_equal, gated_delta.gated_delta(*arrays), want))

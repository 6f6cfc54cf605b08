"""A block's steps between products give nearly MLX's results. Threads change no bit."""

import functools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from common import near, needs_kernels

from moelab.kernels import code, rowwise, team

pytestmark = needs_kernels

random = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return random.normal(scale=scale, size=shape).astype(np.float32)


near = functools.partial(near, bound=1e-6)


@pytest.fixture(params=(1, 2, 5), autouse=True)
def threads(request, monkeypatch):
    """Work of any size is divided among this many threads."""
    monkeypatch.setattr(code, "num_threads", lambda: request.param)
    monkeypatch.setattr(team, "SHARED_WORK", 0)


@pytest.mark.parametrize("D", (128, 24, 3))
def test_norms(D):
    x, weight, more, gate = normal(9, D), normal(D), normal(9, D), normal(9, D)
    norm = [mx.array(x), mx.array(weight), 1e-6]
    want, plain = mx.fast.rms_norm(*norm), mx.fast.rms_norm(norm[0], None, 1e-6)
    assert near(rowwise.rms_norm(x, weight, 1e-6), want)
    assert near(rowwise.rms_norm(x, weight, 1e-6, gate=gate), nn.silu(mx.array(gate)) * want)
    assert near(rowwise.rms_norm(x, None, 1e-6, scale=0.25), plain / 4)
    added = x.copy()
    y = rowwise.rms_norm(added, weight, 1e-6, add=more)
    assert np.array_equal(added, x + more)
    assert near(y, mx.fast.rms_norm(mx.array(x + more), *norm[1:]))
    whole = rowwise.rms_norm(x, weight, 1e-6)
    for i in range(9):
        assert np.array_equal(rowwise.rms_norm(x[i : i + 1], weight, 1e-6)[0], whole[i])


def test_exponentials_over_the_range_of_float32():
    x = np.linspace(-103, 88.7, 50_000, dtype=np.float32)[None]
    want = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    got = rowwise.gated(x, np.ones_like(x)).astype(np.float64)
    whole = x > -88.7  # below this e**-x is inf and the result 0, with MLX too
    assert (np.abs(got - want) <= 4e-7 * np.abs(want))[whole].all()
    assert np.abs(got[~whole]).max() < 1e-36
    assert np.isnan(rowwise.gated(np.full((1, 4), np.nan, np.float32), normal(1, 4))).all()


def test_gates():
    a, b = normal(7, 6, scale=20), normal(7, 6, scale=5)
    A, bias = np.abs(normal(6)), normal(6)
    g, beta = rowwise.gates(a, b, A, bias)
    assert near(g, mx.exp(-mx.array(A) * nn.softplus(mx.array(a) + mx.array(bias))))
    assert near(beta, mx.sigmoid(mx.array(b)))
    y, gate = normal(6, 24), normal(6, 48)
    want = y / (1 + np.exp(-gate[:, 24:].astype(np.float64)))
    rowwise.gated(gate[:, 24:], y, silu=False, out=y)
    assert near(y, want)


@pytest.mark.parametrize("T", (1, 2, 7))
@pytest.mark.parametrize("width", (2, 4))
def test_convolutions(width, T):
    joined, taps = normal(2, width - 1 + T, 96), normal(width, 96)
    conv = nn.Conv1d(96, 96, width, groups=96, bias=False)
    conv.weight = mx.array(taps.T[..., None].copy())
    before, x = (np.ascontiguousarray(a) for a in np.split(joined, [width - 1], axis=1))
    y, after = rowwise.convolve(before, x.reshape(2 * T, 96), taps)
    assert near(y.reshape(2, T, 96), nn.silu(conv(mx.array(joined))))
    assert np.array_equal(after, joined[:, T:])


@pytest.mark.parametrize("E, K", [(64, 8), (7, 1), (5, 5)])
def test_routers(E, K):
    logits = normal(9, E)
    shares = np.array(mx.softmax(mx.array(logits), axis=-1))
    order = np.argsort(-shares, axis=1)[:, :K]
    of = np.take_along_axis(shares, order, axis=1)
    for normalize, want in ((False, of), (True, of / of.sum(1, keepdims=True))):
        experts, scores = rowwise.route(logits, K, normalize)
        assert np.array_equal(experts, order) and near(scores, want)
    equal = np.zeros((1, E), np.float32)
    assert rowwise.route(equal, K, True)[0].tolist() == [list(range(K))]
    numbers = np.full((1, E), np.nan, np.float32)
    assert sorted(rowwise.route(numbers, K, True)[0][0]) == list(range(K))  # distinct experts

"""The kernels against the product of the dequantized matrix, and against themselves."""

import mlx.core as mx
import numpy as np
import pytest

from moelab.kernels import code, quantized

FORMS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def matrices(bits, group, outputs, inputs, experts=1, seed=0):
    """Random matrices, and what they hold as float64 ``[E, N, D]``."""
    key = mx.random.key(seed)
    w = mx.random.normal((experts, outputs, inputs), key=key)
    packed = mx.quantize(w, group, bits)
    whole = np.array(mx.dequantize(*packed, group, bits)).astype(np.float64)
    return quantized.Matrices(*map(np.array, packed), group, bits), whole


def rows(n, inputs, seed=1):
    return np.random.default_rng(seed).normal(size=(n, inputs)).astype(np.float32)


def multiply(made, x, bits, experts=(0,), first=None):
    first = np.array([0, len(x)] if first is None else first)
    return made.multiply(quantized.Packed(x, bits), np.array(experts), first)


@pytest.mark.parametrize("bits, group", FORMS)
@pytest.mark.parametrize("outputs, inputs", [(1, 128), (2, 256), (33, 384), (64, 128), (7, 2048)])
def test_product(bits, group, outputs, inputs):
    made, whole = matrices(bits, group, outputs, inputs)
    for n in (1, 2, 3, 4, 5, 11):
        x = rows(n, inputs)
        # Bound: rounding of a sum of D products, each of float32's relative 2^-24.
        bound = inputs * 2**-24 * (np.abs(x) @ np.abs(whole[0]).max(0))[:, None] + 1e-7
        assert (np.abs(multiply(made, x, bits) - x @ whole[0].T) <= bound).all()


@pytest.mark.parametrize("inputs", (32, 64, 96, 160))
@pytest.mark.parametrize("bits", (4, 8))
def test_short_rows(bits, inputs):
    made, whole = matrices(bits, 32, 5, inputs)
    x = rows(6, inputs)
    np.testing.assert_allclose(multiply(made, x, bits), x @ whole[0].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits, group", FORMS)
def test_a_row_does_not_depend_on_the_others(bits, group):
    made, _ = matrices(bits, group, 66, 256)
    x = rows(23, 256)
    whole = multiply(made, x, bits)
    for n in range(1, 23):
        assert np.array_equal(multiply(made, x[:n], bits), whole[:n])
        assert np.array_equal(multiply(made, x[n:], bits), whole[n:])


@pytest.mark.parametrize("threads", (1, 2, 3, 7))
@pytest.mark.parametrize("outputs", (1, 2, 9, 64))
def test_nor_on_the_number_of_threads(threads, outputs, monkeypatch):
    made, _ = matrices(4, 64, outputs, 256, experts=3)
    x = rows(9, 256)
    args = x, 4, (2, 0, 1), (0, 4, 5, 9)
    want = multiply(made, *args)
    monkeypatch.setattr(quantized, "SHARED_WORK", 0)
    monkeypatch.setattr(code, "num_threads", lambda: threads)
    assert np.array_equal(multiply(made, *args), want)


def test_each_expert_gets_its_rows():
    made, whole = matrices(8, 32, 12, 64, experts=5)
    x = rows(10, 64)
    y = multiply(made, x, 8, (4, 1, 3), (0, 1, 7, 10))
    want = np.concatenate([x[:1] @ whole[4].T, x[1:7] @ whole[1].T, x[7:] @ whole[3].T])
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_memory_that_is_written_to_is_seen():
    w = mx.random.normal((2, 8, 64), key=mx.random.key(0))
    a, b = ([np.array(p) for p in mx.quantize(v, 32, 4)] for v in (w, -2 * w))
    x = rows(3, 64)
    made, other = quantized.Matrices(*a, 32, 4), quantized.Matrices(*b, 32, 4)
    want = multiply(other, x, 4)
    assert not np.array_equal(multiply(made, x, 4), want)
    for mine, new in zip(a, b):
        mine[...] = new
    assert np.array_equal(multiply(made, x, 4), want)


def test_strided_experts_and_no_others():
    w = mx.random.normal((6, 8, 64), key=mx.random.key(0))
    packed = [np.array(p) for p in mx.quantize(w, 32, 4)]
    x = rows(3, 64)
    some = quantized.Matrices(*(p[::2] for p in packed), 32, 4)
    want = multiply(quantized.Matrices(*packed, 32, 4), x, 4, (4,))
    assert np.array_equal(multiply(some, x, 4, (2,)), want)
    with pytest.raises(ValueError, match="one after the other"):
        quantized.Matrices(*(p[:, ::2] for p in packed), 32, 4)


def test_what_is_supported(monkeypatch):
    assert quantized.supported(4, 64, 128)
    for bits, group, inputs in [(3, 64, 128), (4, 16, 64), (4, 64, 96), (2, 32, 64)]:
        assert not quantized.supported(bits, group, inputs)
    monkeypatch.setattr(code, "llvm", None)
    assert not quantized.supported(4, 64, 128)

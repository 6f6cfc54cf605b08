"""Products are near those of dequantized matrices. Other rows or threads alter no row's result."""

import mlx.core as mx
import numpy as np
import pytest
from common import needs_kernels

from moelab.kernels import code, quantized, team

pytestmark = needs_kernels

AFFINE = [("affine", bits, group) for bits in (2, 4, 8) for group in (32, 64, 128)]
FORMS = [*AFFINE, ("mxfp4", 4, 32), ("float", 32, 1)]


def quantize(w, form):
    """Weights, scales, and biases (or None), as numpy arrays."""
    mode, bits, group = form
    if mode == "float":
        return [np.array(w), None, None]
    packed = [np.array(a) for a in mx.quantize(w, group, bits, mode=mode)]
    return packed if mode == "affine" else [*packed, None]


def dequantize(packed, form):
    """The numbers that packed matrices hold, float64 ``[E, N, D]``."""
    mode, bits, group = form
    if mode == "float":
        return packed[0].astype(np.float64)
    arrays = [None if a is None else mx.array(a) for a in packed]
    whole = mx.dequantize(*arrays, group, bits, mode=mode, dtype=mx.float32)
    return np.array(whole).astype(np.float64)


def matrices(form, outputs, inputs, experts=1, seed=0):
    """Random packed matrices, and the numbers that they hold."""
    packed = quantize(mx.random.normal((experts, outputs, inputs), key=mx.random.key(seed)), form)
    return quantized.Matrices(*packed, *reversed(form)), dequantize(packed, form)


def rows(n, inputs, seed=1):
    return np.random.default_rng(seed).normal(size=(n, inputs)).astype(np.float32)


def multiply(made, x, experts=(0,), first=None):
    first = np.array([0, len(x)] if first is None else first)
    y = np.empty((len(x), made.outputs), np.float32)
    each = np.arange(len(x))
    parts = quantized.Parts(np.array(experts), first[:-1], np.diff(first), each, each)
    made.multiply_parts(made.pack(x), parts, y)
    if experts == (0,):
        assert np.array_equal(made.multiply(x), y)
    return y


@pytest.fixture(params=(16, 8))
def widest(request, monkeypatch):
    """How many numbers a processor's vector holds."""
    if request.param > code.widest():
        pytest.skip("this processor has no vectors of 16 numbers")
    monkeypatch.setattr(code, "widest", lambda: request.param)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    "outputs, inputs",
    [(1, 128), (2, 256), (33, 384), (64, 128), (7, 2048), *((5, n) for n in (32, 64, 96, 160))],
)
def test_product(form, outputs, inputs, widest):
    if not quantized.supported(form[1], form[2], inputs, form[0]):
        return
    made, whole = matrices(form, outputs, inputs, experts=3)
    for n in (1, 2, 3, 4, 5, 11):
        x = rows(3 * n, inputs)
        # The bound on a sum of D products, each of which float32 rounds by a share of 2^-24.
        bound = inputs * 2**-24 * (np.abs(x) @ np.abs(whole).max((0, 1)))[:, None] + 1e-7
        want = [part @ w.T for part, w in zip(np.split(x, [n, n + 1]), whole[[2, 0, 1]])]
        got = multiply(made, x, (2, 0, 1), (0, n, n + 1, 3 * n))
        assert (np.abs(got - np.concatenate(want)) <= bound).all()


@pytest.mark.parametrize("inputs", (32, 256))
@pytest.mark.parametrize("exponent", (0, 1, 2, 60, 127, 200, 252))
def test_every_weight_and_scale_of_mxfp4(exponent, inputs, widest):
    """Products with the identity matrix are the numbers that MLX's ``dequantize`` gives."""
    form = ("mxfp4", 4, 32)
    weight = np.full((1, 8, inputs // 8), 0x76543210, np.uint32)
    weight[:, ::2] = 0xFEDCBA98
    packed = weight, np.full((1, 8, inputs // 32), exponent, np.uint8), None
    made, whole = quantized.Matrices(*packed, *reversed(form)), dequantize(packed, form)
    y = multiply(made, np.eye(inputs, dtype=np.float32))
    assert np.array_equal(y.T, whole[0])


@pytest.mark.parametrize("outputs", (1, 2, 9, 66))
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_depends_on_no_other_row_and_on_no_number_of_threads(form, outputs, monkeypatch):
    made, _ = matrices(form, outputs, 256, experts=3)
    x, several = rows(23, 256), ((2, 0, 1), (0, 4, 5, 23))
    whole, parts = multiply(made, x), multiply(made, x, *several)
    for n in range(1, 23):
        assert np.array_equal(multiply(made, x[:n]), whole[:n])
        assert np.array_equal(multiply(made, x[n:]), whole[n:])
    monkeypatch.setattr(team, "SHARED_WORK", 0)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(code, "num_threads", lambda threads=threads: threads)
        assert np.array_equal(multiply(made, x, *several), parts), threads

"""With ``moelab/kernels`` a model's logits are near mlx-lm's, and equal in every mode."""

import dataclasses
import zlib

import families
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from common import LONG, STREAMED, close, greedy_logits, loaded, near, needs_kernels
from families import K
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_next
from mlx_lm.models.switch_layers import SwitchGLU

from moelab import StreamConfig, kernels
from moelab.kernels import attention, experts, modules
from moelab.system import HERE, Mac

pytestmark = [needs_kernels, pytest.mark.usefixtures("small_matrices")]


def quantize(module, **kwargs):
    module.update(nn.utils.tree_map(lambda p: p + 0.01, module.parameters()))
    if kwargs:
        nn.quantize(module, **kwargs)
    mx.eval(module.parameters())
    return module.eval()


def normal(*shape):
    return mx.random.normal(shape, key=mx.random.key(3))


def chosen(tokens, top_k=2):
    return mx.random.randint(0, 8, (1, tokens, top_k), key=mx.random.key(4))


def use(layer, *args):
    """Return the result of MLX's kernels, then let the layer use moelab's kernels."""
    want = layer(*args)
    mx.eval(want)
    kernels.use(layer)
    return want


FORMS = [dict(bits=bits, group_size=32) for bits in (2, 4, 8)]
FORMS += [dict(mode="mxfp4", bits=4, group_size=32), {}]


@pytest.mark.parametrize("tokens", (1, 3, 40))
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts(form, tokens, bias):
    """Experts with a bias take a call for each projection. No token depends on another token."""
    layer = quantize(SwitchGLU(64, 128, 8, bias=bias), **form)
    x, indices = normal(1, tokens, 64), chosen(tokens)
    want = use(layer, x, indices)
    assert isinstance(layer, experts.FastSwitchGLU) != bias
    assert isinstance(layer.up_proj, modules.SwitchMatrices)
    got = layer(x, indices)
    assert near(got, want)
    each = [layer(x[:, i : i + 1], indices[:, i : i + 1]) for i in range(tokens)]
    assert mx.array_equal(mx.concatenate(each, axis=1), got)
    half = x.astype(mx.bfloat16)  # MLX's kernels compute it
    assert layer(half, indices).dtype == SwitchGLU.__call__(layer, half, indices).dtype


@pytest.mark.parametrize("wider, in_one_call", [("up_proj", False), ("down_proj", True)])
def test_experts_of_other_forms_go_by_projection(wider, in_one_call):
    layer = SwitchGLU(64, 96, 8)
    nn.quantize(layer, 32, 8, class_predicate=lambda path, _: path == wider)
    nn.quantize(layer, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    want = use(layer, normal(1, 2, 64), chosen(2))
    assert bool(experts.gate_up_down(layer)) == in_one_call
    assert near(layer(normal(1, 2, 64), chosen(2)), want)


@pytest.mark.parametrize("x", (1e18, 1e19, 1e25, 1e38, np.inf, -np.inf, np.nan))
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_large_inputs_and_those_that_are_no_numbers(bits, x, recwarn):
    """numpy gives no warnings, and a result is finite where MLX's is."""
    of = normal(2, 5, 64)
    of[1, 3, 7] = x
    of[0] = mx.clip(of[0] * (x if np.isfinite(x) else 1), -3e38, 3e38)
    indices = mx.random.randint(0, 8, (5, 3), key=mx.random.key(4))
    for layer, *args in (SwitchGLU(64, 96, 8), indices), (qwen3_next.Qwen3NextMLP(64, 96),):
        quantize(layer, group_size=32, bits=bits)
        want = [np.array(layer(row[None], *(a[None] for a in args))) for row in of]
        kernels.use(layer)
        got = [np.array(layer(row[None], *(a[None] for a in args))) for row in of]
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    for mask in (None, "causal"):
        attention.attend(*[np.array(of[:, None])] * 3, 1.0, mask)
    assert not [str(w.message) for w in recwarn]


@pytest.mark.parametrize("variant", ("plain32", "affine4"))
@pytest.mark.parametrize("name", ("qwen3_moe", "qwen3_5_moe"))
def test_a_family_that_is_trained_gets_the_gradients_of_mlx(name, variant, stored):
    path = stored(name, variant)
    tokens = mx.array([LONG[:20]])

    def gradients(kernels_):
        model = loaded(path, mode="resident", kernels=kernels_)
        model.train()
        _, grads = nn.value_and_grad(model, lambda x: model(x).square().mean())(tokens)
        return tree_flatten(grads)

    for (path_, got), (_, want) in zip(gradients("fast"), gradients("mlx"), strict=True):
        assert mx.array_equal(got, want), path_
        assert mx.abs(want).max() > 0, path_


def test_what_does_not_fit_goes_the_way_of_mlx(monkeypatch):
    plain, affine = nn.Linear(64, 64), dict(group_size=32, bits=4)
    fp4, half, fast = (
        plain.to_quantized(**form).eval() for form in (dict(mode="nvfp4"), affine, affine)
    )
    plain.set_dtype(mx.bfloat16), half.set_dtype(mx.bfloat16)
    forms = dict(groups=1), dict(groups=24, padding=1), dict(groups=24, stride=2)
    convolutions = (nn.Conv1d(24, 24, 4, **form) for form in forms)
    for layer in (plain, half, fp4, nn.Linear(38, 64), *convolutions):
        assert kernels.use(layer) == {"fast": 0, "mlx": 1}
    # An mlx-lm module that is quantized by a mode alone does not say how many bits that means.
    by_mode = quantize(SwitchGLU(64, 64, 8), mode="mxfp4")
    want = use(by_mode, normal(1, 2, 64), chosen(2))
    assert mx.array_equal(by_mode(normal(1, 2, 64), chosen(2)), want)
    kernels.use(fast)
    x = normal(3, 64).astype(mx.bfloat16)
    want = nn.QuantizedLinear.__call__(fast, x)
    assert mx.array_equal(fast(x), want)  # half precision
    assert fast(mx.zeros((0, 64))).shape == (0, 64)
    monkeypatch.undo()  # from here on MLX computes small matrices (on macOS all matrices)
    layers = [nn.Linear(256, 64), nn.Linear(256, 63)]
    assert kernels.use(nn.Sequential(*layers))["fast"] == (not isinstance(HERE, Mac))
    monkeypatch.setattr(modules, "HERE", Mac())
    assert kernels.use(nn.Linear(256, 64)) == {"fast": 0, "mlx": 1}


# Every family in one form, chosen by its name, and gpt_oss in its authors' form, too.
FAMILIES = sorted(
    {
        (name, ("affine4", "affine8", "mxfp4", "plain32")[zlib.crc32(name.encode()) % 4])
        for name in families.FAMILIES.keys() - families.EXPERTS_ONLY
    }
    | {("gpt_oss", "mxfp4"), ("gpt_oss", "affine4")}
)


@pytest.mark.parametrize("name, variant", FAMILIES)
def test_every_family(name, variant, stored):
    path = stored(name, variant)

    def logits(**fields):
        with loaded(path, **fields) as model:
            return [greedy_logits(model, LONG[:n], 2) for n in (20, 40)]

    mlx, fast = logits(mode="resident", kernels="mlx"), logits(mode="resident", kernels="fast")
    for got, want in zip(fast, mlx):
        assert close(got, want)
    assert not all(map(np.array_equal, fast, mlx))
    for mode in STREAMED:
        streamed = logits(mode=mode, kernels="fast", slots=K + 1)
        assert all(map(np.array_equal, streamed, fast)), mode


def test_auto_kernels_and_half_precision_that_is_streamed_the_way_of_mlx(stored):
    def chosen(**config):
        resolved = StreamConfig(**config).resolved()
        assert resolved == dataclasses.replace(StreamConfig(**config), kernels=resolved.kernels)
        return resolved.kernels

    assert chosen() == chosen(mode="resident") == chosen(dtype="float32") == "fast"
    assert chosen(dtype="bfloat16") == chosen(kernels="mlx") == "mlx"
    assert chosen(dtype="bfloat16", kernels="fast") == "fast"  # as asked
    path = stored("qwen3_moe", "mxfp4")
    half = dict(kernels="fast", dtype="bfloat16", slots=K + 1)
    of = (loaded(path, mode=mode, **half) for mode in ("fused", "resident"))
    assert mx.array_equal(*(model(mx.array([LONG[:20]])) for model in of))

"""Blocks that the kernels compute as a whole, and what makes mlx-lm compute them."""

import copy
import functools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from common import LONG, close, in_passes, loaded, needs_kernels
from mlx_lm.models import qwen3_5, qwen3_moe, qwen3_next
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

from moelab.hooks import hooked, replaced
from moelab.kernels import layers
from moelab.speculation.rollback import Rollback

pytestmark = [needs_kernels, pytest.mark.usefixtures("small_matrices")]

FAMILIES = "qwen3_5_moe", "qwen3_next", "qwen3_moe"
TOKENS = mx.array([[5, 6, 7, 8, 9, 10, 11, 12]])


@pytest.fixture
def load(stored):
    def load(family, variant="affine4", mode="resident", kernels="fast", **fields):
        return loaded(stored(family, variant), mode=mode, kernels=kernels, **fields)

    return load


def logits(model, tokens=TOKENS, step=1):
    return np.array(in_passes(model, tokens, step))


@pytest.mark.parametrize("variant", ("affine4", "affine8", "mxfp4", "plain32"))
@pytest.mark.parametrize("family", FAMILIES)
def test_near_mlx_and_the_same_bits_in_any_passes_and_modes(family, variant, load):
    tokens = mx.array([LONG[: layers.MOST_TOKENS + 8]])
    want = logits(load(family, variant, kernels="mlx"), tokens)
    model = load(family, variant)
    got = logits(model, tokens)
    assert all(isinstance(layer, layers.Layer) for layer in model.layers)
    assert any(record for layer in model.layers for record in layer._passes.values())
    assert close(got, want)
    for step in (3, 10, tokens.size):
        assert np.array_equal(logits(model, tokens, step), got)
    for mode in ("stacked", "fused"):
        streamed = load(family, variant, mode=mode, slots=3)
        assert np.array_equal(logits(streamed, tokens), got), mode


def in_place(model):
    model.layers[0].mlp.gate.biases[0] = 3.0


def another_module(model):
    shared = model.layers[-1].mlp.shared_expert
    shared.up_proj = nn.Linear(64, 64, bias=False)
    shared.up_proj.weight = mx.eye(64)


def half(model):
    for module in model.layers[-1].mlp.switch_mlp.children().values():
        for key in {"scales", "biases"} & {*module}:
            module[key] = (1.5 * module[key]).astype(mx.bfloat16)


def another_top_k(model):
    model.layers[0].mlp.top_k = 1


ASSIGNED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "linear_attn.dt_bias",
    "linear_attn.A_log",
    "linear_attn.norm.weight",
    "linear_attn.conv1d.weight",
    "linear_attn.in_proj_qkv.scales",
    "mlp.gate.biases",
    "self_attn.q_norm.weight",
)


def assigned(model, name):
    """Change an array in place and assign it again."""
    path, _, key = name.rpartition(".")
    layer = next(layer for layer in model.layers if path.split(".")[0] in layer)
    module = dict(layer.named_modules())[path]
    a = module[key]
    a[1:] = 3 * a[1:] + 0.5
    module[key] = a


CHANGES = {name: functools.partial(assigned, name=name) for name in ASSIGNED}
CHANGES |= {change.__name__: change for change in (in_place, another_module, half, another_top_k)}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_record_follows_every_change(change, load):
    fast, mlx = load("qwen3_5_moe"), load("qwen3_5_moe", kernels="mlx")
    before = logits(fast)
    change(fast), change(mlx)
    got = logits(fast)
    assert close(got, logits(mlx)) and not close(got, before)
    assert np.array_equal(logits(fast, step=4), got)


PARTS = [(part, 1) for part in ("linear_attn", "mlp", "mlp.gate", "mlp.shared_expert", "")]


@pytest.mark.parametrize("part, step", [*PARTS, ("", 4)])
def test_hooks_see_every_call(part, step, load):
    """A hook around a whole layer, as drafts set it, changes no bit; the recorded pass stays."""
    model, seen = load("qwen3_5_moe"), []
    want, layer = logits(model, step=step), model.layers[0]
    module, record = layer, layer._passes[step]
    for name in filter(None, part.split(".")):
        module = module[name]

    def hook(original, *args, **kwargs):
        seen.append(1)
        return original(*args, **kwargs)

    with hooked(module, hook):
        got = logits(model, step=step)
        assert close(got, want) and len(seen) == TOKENS.shape[1] // step
        assert part or (np.array_equal(got, want) and layer._passes[step] is record)
    assert np.array_equal(logits(model, step=step), want) and len(seen) == TOKENS.shape[1] // step


@pytest.mark.parametrize(
    "family, of, name",
    [
        ("qwen3_5_moe", qwen3_5, "gated_delta_update"),
        ("qwen3_next", qwen3_next, "gated_delta_update"),
        ("qwen3_moe", qwen3_moe, "scaled_dot_product_attention"),
        ("qwen3_5_moe", qwen3_5.GatedDeltaNet, "__call__"),
        ("qwen3_5_moe", qwen3_5.DecoderLayer, "__call__"),
        ("qwen3_next", qwen3_next.Qwen3NextSparseMoeBlock, "__call__"),
        ("qwen3_moe", qwen3_moe.Attention, "__call__"),
        ("qwen3_moe", SwitchGLU, "__call__"),
        ("qwen3_5_moe", nn.QuantizedLinear, "__call__"),
        ("qwen3_5_moe", qwen3_next.Qwen3NextMLP, "__call__"),
    ],
)
@pytest.mark.parametrize("mode", ("resident", "stacked"))
def test_what_a_library_replaces_is_called(mode, family, of, name, load, monkeypatch):
    model, seen, real = load(family, mode=mode, slots=3), [], getattr(of, name)
    want = logits(model)
    with monkeypatch.context() as library:
        library.setattr(of, name, lambda *a, **k: seen.append(1) or real(*a, **k))
        assert close(logits(model), want) and seen
        told = {replaced(getattr(m, "originals", ())) for m in model.modules()}
        assert f"{of.__name__}.{name}" in told or (mode, of) == ("stacked", SwitchGLU)
    assert np.array_equal(logits(model), want)


def taken_back(model, strategy, wrong):
    """Return logits of passes whose wrong tokens are taken back, and the most states in memory."""
    cache, got, most = make_prompt_cache(model), [], 0
    rollback = Rollback(model, cache, strategy)
    for i in range(0, TOKENS.shape[1], 2):
        part = mx.concatenate([TOKENS[:, i : i + 2], mx.array([wrong])], axis=1)
        got.append(np.array(rollback(part))[:, :2])
        state = sum(c[1].nbytes for c in cache if isinstance(c, ArraysCache))
        most = max(most, rollback.nbytes / state)
        rollback.undo(len(wrong))
        rollback.commit()
    return np.concatenate(got, axis=1), most


@pytest.mark.parametrize("strategy", ("auto", "states"))
@pytest.mark.parametrize("family", ("qwen3_5_moe", "qwen3_next"))
def test_passes_that_are_taken_back_leave_no_bit(family, strategy, load):
    """``Rollback`` takes less memory than a state for each of the 5 tokens would."""
    model = load(family)
    want = logits(model)
    got, states = taken_back(model, strategy, [90, 91, 92])
    assert np.array_equal(got, want) and states < 3
    if family == "qwen3_5_moe":
        assert all(5 in layer._passes for layer in model.layers)


@pytest.mark.parametrize("strategy", ("replay", "states"))
def test_a_pass_that_goes_mlxs_way_can_be_taken_back(strategy, load):
    """A hook on a block's convolution is called, and ``Rollback`` still records what it needs."""
    model, seen = load("qwen3_5_moe"), []
    want, layer = logits(model), next(layer for layer in model.layers if layer.is_linear)

    def hook(original, x):
        seen.append(x.shape[1])
        return original(x)

    with hooked(layer.linear_attn.conv1d, hook):
        got, _ = taken_back(model, strategy, [90, 91])
    assert close(got, want) and set(seen) == {4 + 3}
    assert layer.linear_attn.recorder is None


def test_a_state_that_somebody_holds_stays(load, monkeypatch):
    model = load("qwen3_5_moe")
    want = logits(model)
    monkeypatch.setattr(layers, "IN_PLACE_NBYTES", 0)
    assert np.array_equal(logits(model), want)
    cache = make_prompt_cache(model)
    model(TOKENS, cache=cache)
    recurrent = next(c for c in cache if isinstance(c, ArraysCache))
    for hold in (lambda a: a, mx.array, copy.deepcopy, lambda a: a[:, :1], np.asarray):
        model(TOKENS[:, :1], cache=cache)
        held = hold(recurrent[1])
        before = np.array(held)
        model(TOKENS[:, :1], cache=cache)
        assert np.array_equal(np.array(held), before)
        assert not np.array_equal(np.array(recurrent[1])[tuple(map(slice, before.shape))], before)

"""DFlash drafts: z-lab's layout against an independent numpy forward, and the trained drafts."""

import json
import shutil
from functools import cache as once

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from common import needs_kernels
from draft_files import D, L, V, b, target, write_draft
from drafting import FAST, MODELS, plain, steps, texts, trained
from mlx_lm.models.cache import make_prompt_cache
from tiny_drafts import DRAFTS

from moelab import kernels
from moelab.checkpoint import CheckpointError
from moelab.commands.drafting import open_draft
from moelab.lab.texts import heldout_prompts
from moelab.speculation.dflash import DFlashDraft, default_layer_ids, load_model
from moelab.speculation.target import Capture


def reference(w, block, features, window):
    """The paper's draft in float64 numpy, no cache: block [b, D] after features [T, n * D]."""

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T

    def heads(x, name, num_heads):
        return linear(x, name).reshape(len(x), num_heads, d)

    def rope(x, at):  # [T, H, d], the token at each place
        half = d // 2
        angles = at[:, None, None] * 10000.0 ** (-np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], -1)

    T, H, K, d = len(features), 4, 2, 16
    context, x = norm(linear(features, "fc"), "hidden_norm"), block
    at = np.arange(T + len(block))
    for i in range(3):
        p = f"layers.{i}.self_attn."
        h = norm(x, f"layers.{i}.input_layernorm")
        rows = np.concatenate([context, h])
        q = rope(norm(heads(h, p + "q_proj", H), p + "q_norm"), at[T:])
        k = rope(norm(heads(rows, p + "k_proj", K), p + "k_norm"), at).repeat(H // K, axis=1)
        v = heads(rows, p + "v_proj", K).repeat(H // K, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / d**0.5
        if i == 1:
            scores[:, abs(at[T:, None] - at) >= window] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + linear(np.einsum("hqk,khd->qhd", share, v).reshape(len(x), H * d), p + "o_proj")
        h, p = norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp."
        gate = linear(h, p + "gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, p + "up_proj"), p + "down_proj")
    return norm(x, "norm")


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("chunks", [[11], [1, 1], [3, 7, 4], [0]])
def test_equals_the_paper(tmp_path, chunks, fast, small_matrices):
    w = write_draft(tmp_path)
    model = load_model(tmp_path)
    model.set_dtype(mx.float32)
    if fast:  # in one piece, though these matrices are small
        kernels.use(model)
        blocks = kernels.blocks_of(model)
        assert blocks == {"Attention": 3, "TransformerBlock": 3}
    rng = np.random.default_rng(1)
    features = rng.normal(size=(sum(chunks), 3 * D))
    block = rng.normal(size=(b, D))
    cache, at = model.make_cache(), 0
    for n in chunks:
        if n:
            model.extend(mx.array(features[None, at : at + n].astype(np.float32)), cache)
            another = mx.array(rng.normal(size=(1, b, D)).astype(np.float32))
            model(another, cache)  # a block leaves nothing in the cache
        at += n
    got = np.array(model(mx.array(block[None].astype(np.float32)), cache))[0]
    assert all(c.offset == sum(chunks) for c in cache)
    np.testing.assert_allclose(got, reference(w, block, features, 8), atol=2e-5)


def test_capture_hears_its_layers_and_leaves_nothing():
    assert default_layer_ids(5, 36) == [1, 9, 17, 25, 33] and default_layer_ids(1, 36) == [18]
    assert default_layer_ids(4, 8) == DRAFTS["tiny-dflash"][1]
    model, other = target(), target()
    ids = mx.array([[3, 1, 4, 1, 5]])
    x, outputs = model.model.embed_tokens(ids), []
    for layer in model.layers:
        x = layer(x, mask="causal")
        outputs.append(x)
    classes = [type(layer) for layer in model.layers]
    capture = Capture(model, (4, 1))
    with capture:
        model(ids)
    with capture as seen, Capture(model, (1,)) as inner:  # it can be entered again
        cache = make_prompt_cache(model)
        model(ids[:, :2], cache=cache)
        assert seen.features.shape == (1, 2, 2 * D)
        model(ids[:, 2:], cache=cache)
        other(ids)
    expected = mx.concatenate([outputs[4], outputs[1]], -1)  # of both calls
    assert mx.allclose(seen.features, expected, atol=1e-5)
    assert mx.allclose(inner.features, outputs[1], atol=1e-5)
    with pytest.raises(RuntimeError, match="stop"), Capture(model, (0, 5)):
        assert type(model.layers[0]) is not classes[0]
        raise RuntimeError("stop")
    assert [type(layer) for layer in model.layers] == classes
    assert [type(layer) for layer in other.layers] == classes


OTHER_LAYERS = {"mask_token_id": 7, "target_layer_ids": [1, 2, L]}


@pytest.mark.parametrize(
    "changes, of_target, message",
    [
        ({}, {"vocab": V + 1}, "vocabulary of 65, .* got 64"),
        ({}, {"hidden": 2 * D}, "hidden size of 64, .* got 32"),
        ({}, {"layers": L + 1}, "layers of 7, .* got 6"),
        ({"dflash_config": OTHER_LAYERS}, {}, r"from 0 to 5, .* got \[1, 2, 6\]"),
        ({"block_size": 1}, {}, "got ValueError: a block_size of 1"),
    ],
)
def test_drafts_that_do_not_fit_and_folders_without_one(changes, of_target, message, tmp_path):
    write_draft(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        DFlashDraft(tmp_path).bind(target(**of_target))
    (tmp_path / "model.safetensors").unlink()
    no_drafts = {MODELS / "tiny-moe": "ModelDraft", tmp_path / "nowhere": "expected a DFlash draft"}
    for folder, said in {**no_drafts, tmp_path: str(tmp_path)}.items():
        with pytest.raises(CheckpointError, match=said):
            DFlashDraft(folder)


@pytest.mark.parametrize("name", ["tiny-mtp", "tiny-dflash", "tiny-draft"])
def test_scales_wider_than_their_layer(name, tmp_path):
    """mlx-lm would divide by 0, which ends the process; also beside a matrix that is not packed."""
    path = shutil.copytree(MODELS / name, tmp_path / name)
    file, told = str(path / "model.safetensors"), path / "config.json"
    if name == "tiny-dflash":  # quantized as mlx-lm does
        model, config = load_model(path), json.loads(told.read_text())
        nn.quantize(model, 64, 8)
        model.save_weights(file)
        told.write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 8}}))
        assert isinstance(load_model(path).fc, nn.QuantizedLinear)
    mx.eval(weights := mx.load(file))
    name = next(k for k in weights if k.endswith("proj.scales")).removesuffix("scales")
    for dtype in (mx.uint32, mx.float32):
        damaged = {f"{name}weight": weights[f"{name}weight"].astype(dtype)}
        damaged[f"{name}scales"] = mx.zeros((weights[f"{name}scales"].shape[0], 2400))
        mx.save_safetensors(file, weights | damaged)
        with pytest.raises(CheckpointError, match=f"{path}.*scales that fit"):
            open_draft(path)


# The trained drafts


def test_a_long_text_is_read_in_parts_that_take_little_memory():
    target, draft = mlx_lm.load(str(MODELS / "tiny-moe"))[0], DFlashDraft(MODELS / "tiny-dflash")
    size = len(draft.layer_ids) * draft.model.args.hidden_size
    features = mx.zeros((1024, size))
    draft.bind(target)
    mx.eval(features)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    draft.extend(mx.zeros(len(features), mx.uint32), features)
    draft.propose(5, 4, lambda logits: logits)
    mx.eval([c.state for c in draft.cache])
    kept = sum(c.nbytes for c in draft.cache)
    assert draft.cache[0].offset == len(features)
    assert mx.get_peak_memory() - before < 1.7 * kept  # a layer's cache is copied when it grows
    assert mx.get_cache_memory() < kept / 2


@pytest.mark.parametrize(
    "name, n, least", [("tiny-dflash", 15, 2.5), ("tiny-draft", 15, 3.0), ("tiny-mtp", 1, 1.6)]
)
def test_acceptance_and_the_targets_own_text(name, n, least):
    """On held-out code: the plain text, and far above an untrained or misread draft (tau 1.0)."""
    model, draft = trained(kernels="auto"), open_draft(MODELS / name)
    accepted = []
    for prompt in heldout_prompts(MODELS / "tiny-moe", "code", 64)[::60][:2]:
        made = steps(model, prompt, draft, n, 48)
        assert [t for t, *_ in made] == plain(model, prompt, 48)
        rounds = dict.fromkeys(r for *_, r in made)
        accepted += [r.accepted for r in rounds if r.drafted == n]
    assert 1 + np.mean(accepted) >= least


@once
def written(i, tokens, kernels):
    return plain(trained(kernels=kernels), texts(20)[i], tokens)


@pytest.mark.parametrize("kernels", ["mlx", pytest.param("fast", marks=needs_kernels)])
@pytest.mark.parametrize("mode", ["resident", "fused"])
@pytest.mark.parametrize("name", ["tiny-dflash", "tiny-draft"])
@pytest.mark.parametrize("i", range(2 if FAST else 5))
def test_greedy_text_at_every_block_size(name, mode, kernels, i):
    """Some block sizes, the token before the drafts included.

    Another token may be chosen only between two that tie within 1e-4, and with the fast kernels
    none.
    """
    tokens = 24 if FAST else 100
    prompt, expected = texts(20)[i], written(i, tokens, kernels)
    draft = open_draft(MODELS / name, kernels)
    for block in (2, 7, 16):
        made = steps(trained(mode, kernels), prompt, draft, block - 1, tokens)
        got = [t for t, *_ in made]
        assert len(got) == tokens
        at = next((j for j in range(tokens) if got[j] != expected[j]), None)
        assert kernels == "mlx" or at is None, (block, at)
        if at is not None:
            logits = trained(kernels=kernels)(mx.array([prompt + expected[:at]]))[0, -1]
            gap = (logits[expected[at]] - logits[got[at]]).item()
            assert abs(gap) <= 1e-4, (block, at, gap)

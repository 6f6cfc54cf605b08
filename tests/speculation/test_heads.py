"""Drafts that read the target's states: DFlash, and models' own heads (MTP)."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache as once

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from common import FAST, TINY_MOE, needs_kernels
from draft_files import D, L, V, b, target, write_draft
from drafting import MODELS, difference, plain, seen, steps, texts, trained
from families import GATE_UP_DOWN, HUGGING_FACE, build
from faults import at_every_line
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from tiny_drafts import DRAFTS

from moelab import kernels, speculation
from moelab.checkpoint import CheckpointError, model_classes
from moelab.commands.drafting import open_draft
from moelab.lab.texts import heldout_prompts
from moelab.speculation.dflash import DFlashDraft, default_layer_ids, load_model
from moelab.speculation.mtp import NEXTN, MTPDraft, _less_one, load_head
from moelab.speculation.target import Capture


def reference(w, block, features, window):
    """The paper's draft in numpy float64, without cache: block [b, D] after features [T, n * D]."""

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T

    def heads(x, name, num_heads):
        return linear(x, name).reshape(len(x), num_heads, d)

    def rope(x, at):  # x [T, H, d], and each row's position
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
    if fast:  # the kernels compute whole blocks, though these matrices are small
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
    with capture as heard, Capture(model, (1,)) as inner:  # it can be entered again
        cache = make_prompt_cache(model)
        model(ids[:, :2], cache=cache)
        assert heard.features.shape == (1, 2, 2 * D)
        model(ids[:, 2:], cache=cache)
        other(ids)
    expected = mx.concatenate([outputs[4], outputs[1]], -1)  # the features of both calls
    assert mx.allclose(heard.features, expected, atol=1e-5)
    assert mx.allclose(inner.features, outputs[1], atol=1e-5)
    with pytest.raises(RuntimeError, match="stop"), Capture(model, (0, 5)):
        assert type(model.layers[0]) is not classes[0]
        raise RuntimeError("stop")
    assert [type(layer) for layer in model.layers] == classes
    assert [type(layer) for layer in other.layers] == classes


@pytest.mark.parametrize(
    "changes, of_target, message",
    [
        ({}, {"vocab": V + 1}, "vocabulary of 65, .* got 64"),
        ({}, {"hidden": 2 * D}, "hidden size of 64, .* got 32"),
        ({}, {"layers": L + 1}, "layers of 7, .* got 6"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [L]}}, {}, r"5, .* got \[6\]"),
        ({"block_size": 1}, {}, "got ValueError: a block_size of 1"),
    ],
)
def test_drafts_that_do_not_fit_and_folders_without_one(changes, of_target, message, tmp_path):
    write_draft(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        DFlashDraft(tmp_path).bind(target(**of_target))
    (tmp_path / "model.safetensors").unlink()
    no_drafts = {TINY_MOE: "ModelDraft", tmp_path / "nowhere": "expected a DFlash draft"}
    for folder, said in {**no_drafts, tmp_path: str(tmp_path)}.items():
        with pytest.raises(CheckpointError, match=said):
            DFlashDraft(folder)


@pytest.mark.parametrize("name", ["tiny-mtp", "tiny-dflash", "tiny-draft"])
def test_scales_wider_than_their_layer(name, tmp_path):
    """Such a draft is refused, packed or not: mlx-lm would divide by 0, which ends the process."""
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
    draft = DFlashDraft(MODELS / "tiny-dflash")
    features = mx.zeros((1024, len(draft.layer_ids) * draft.model.args.hidden_size))
    draft.bind(mlx_lm.load(str(TINY_MOE))[0])
    mx.eval(features)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    draft.extend(mx.zeros(len(features), mx.uint32), features)
    draft.propose(5, 4, lambda logits: logits)
    mx.eval([c.state for c in draft.cache])
    kept = sum(c.nbytes for c in draft.cache)
    assert draft.cache[0].offset == len(features)
    if mx.default_device() == mx.cpu:  # a GPU holds several layers' inputs until they are computed
        assert mx.get_peak_memory() - before < 1.7 * kept  # a layer's cache is copied as it grows
    mx.synchronize()
    assert mx.get_cache_memory() < kept / 2


@pytest.mark.parametrize(
    "name, n, least", [("tiny-dflash", 15, 2.5), ("tiny-draft", 15, 3.0), ("tiny-mtp", 1, 1.6)]
)
def test_acceptance(name, n, least):
    """On held-out code tau is far above the 1.0 of an untrained draft."""
    draft, accepted = open_draft(MODELS / name), []
    for prompt in heldout_prompts(TINY_MOE, "code", 64)[::60][:2]:
        rounds = dict.fromkeys(r for *_, r in steps(trained(), prompt, draft, n, 48))
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
    """Only MLX's kernels may choose another token, and only if two tokens tie within 1e-4."""
    tokens = 24 if FAST else 100
    prompt, expected = texts(20)[i], written(i, tokens, kernels)
    draft = open_draft(MODELS / name, kernels)
    for block in (2, 7, 16):  # a block has the token before the drafts, too
        made = steps(trained(mode, kernels), prompt, draft, block - 1, tokens)
        got = [t for t, *_ in made]
        assert len(got) == tokens
        if got != expected:
            at = next(j for j in range(tokens) if got[j] != expected[j])
            assert kernels == "mlx", (block, at)
            logits = trained(kernels=kernels)(mx.array([prompt + expected[:at]]))[0, -1]
            gap = (logits[expected[at]] - logits[got[at]]).item()
            assert abs(gap) <= 1e-4, (block, at, gap)


HEAD, T = MODELS / "tiny-mtp", 9


def random_weights(module):
    """Random weights for a module's parameters, by name; norms have values as in trained models."""
    mx.random.seed(1)
    weights = {}
    for k, p in tree_flatten(module.parameters()):
        near = ("norm" in k and p.ndim == 1) * (1.75 if "k_norm" in k or "q_norm" in k else 1)
        weights[k] = near + 0.1 * mx.random.normal(p.shape)
    return weights


def write(folder, weights, config):
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "._model.safetensors").write_bytes(b"Finder's")  # a Mac adds it on foreign drives
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_original_form(name, weights):
    """Return a head's tensors with the names and layouts of an original Qwen checkpoint."""
    raw = {f"mtp.{k}": w - 1 if w.ndim == 1 and "norm" in k else w for k, w in weights.items()}
    mlp = "mtp.layers.0.mlp"
    found = {(p, "weight"): raw.pop(f"{mlp}.switch_mlp.{p}.weight") for p in GATE_UP_DOWN}
    _, convert = HUGGING_FACE[name.replace("next", "moe")]
    return raw | convert(mlp, found)


def same(head, expected, D):
    """Return whether three calls of a head, a part each, give ``expected(embedded, hidden)``."""
    mx.random.seed(2)
    embedded, hidden = mx.random.normal((1, T, D)), mx.random.normal((1, T, D))
    cache, wanted = make_prompt_cache(head), expected(embedded, hidden)
    parts = [head(embedded[:, a:b], hidden[:, a:b], cache) for a, b in ((0, 4), (4, 5), (5, T))]
    return mx.abs(mx.concatenate(parts, axis=1) - wanted).max().item() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "qwen3_5_mtp"])
def test_a_head_of_qwen_computes_as_in_mlx_vlm(name, tmp_path):
    config = json.loads((TINY_MOE / "config.json").read_text())["text_config"]
    library = pytest.importorskip("mlx_vlm.speculative.drafters.qwen3_5_mtp")
    theirs = library.Model(library.ModelConfig.from_dict({"text_config": dict(config)}))
    theirs.load_weights(list((weights := random_weights(theirs)).items()))
    told = {"model_type": name, "text_config": config}
    if name == "qwen3_next":
        rope = config["rope_parameters"]
        flat = {k: rope[k] for k in ("rope_theta", "partial_rotary_factor")}
        told = {**config, **flat, "model_type": name, "mlp_only_layers": []}
    stored = weights if name == "qwen3_5_mtp" else in_original_form(name, weights)
    head = load_head(write(tmp_path, stored, told))

    def expected(embedded, hidden):
        return theirs._forward_hidden(embedded, hidden, theirs.make_cache(), mx.arange(T)[None])

    assert same(head, expected, config["hidden_size"])


@pytest.mark.parametrize("name", NEXTN)
def test_a_head_in_the_layer_after_the_last(name, tmp_path):
    """A head computes the same as the last layer of a family's model with one more layer."""
    model, config = build(name)
    L, D, args = config["num_hidden_layers"], config["hidden_size"], model.args
    _, args_class = model_classes(config)
    more = type(model)(args_class.from_dict({**config, "num_hidden_layers": L + 1}))
    path = f"model.layers.{L}."
    raw, w = {}, random_weights(more.model.layers[L])
    for k, a in w.items():
        module, _, leaf = k.rpartition(".")
        if "switch_mlp" in k:
            module = module.replace("switch_mlp", "experts.{}")
            raw |= {f"{path}{module.format(e)}.{leaf}": a[e] for e in range(len(a))}
        elif "embed_q" not in k and "unembed_out" not in k:
            raw[path + k] = a
    if "self_attn.embed_q.weight" in w:
        rows = args.num_attention_heads * (args.qk_nope_head_dim + args.v_head_dim)
        mx.random.seed(5)
        raw[f"{path}self_attn.kv_b_proj.weight"] = mx.random.normal((rows, args.kv_lora_rank))
    extra = {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "shared_head.norm": (D,)}
    extra |= {"shared_head.head": (config["vocab_size"], D)}
    if name == "glm4_moe_lite":  # this head has an embedding of its own
        extra["embed_tokens"] = (config["vocab_size"], D)
    raw |= {
        f"{path}{k}.weight": 0.1 * mx.random.normal(s) + (len(s) == 1) for k, s in extra.items()
    }
    head = load_head(write(tmp_path, raw, config))
    if name == "glm4_moe_lite":
        assert mx.array_equal(head.embedding.weight, raw.pop(f"{path}embed_tokens.weight"))
    more.load_weights(list(more.sanitize(dict(raw)).items()), strict=False)

    def norm(x, part):
        return mx.fast.rms_norm(x, raw[f"{path}{part}.weight"], args.rms_norm_eps)

    def expected(embedded, hidden):
        both = mx.concatenate([norm(embedded, "enorm"), norm(hidden, "hnorm")], axis=-1)
        mask = nn.MultiHeadAttention.create_additive_causal_mask(T) == 0
        x = both @ raw[f"{path}eh_proj.weight"].T
        return norm(more.model.layers[L](x, mask, None), "shared_head.norm")

    assert same(head, expected, D)


def test_a_family_without_a_head_and_damaged_ones_are_refused(tmp_path):
    write(tmp_path, {"a": mx.zeros(1)}, {"model_type": "gpt_oss", "num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="gpt_oss is not known here: expected one of qwen3"):
        MTPDraft(tmp_path)
    for damaged in ({}, {"text_config": "x"}, {"num_hidden_layers": 1, "quantization": 3}):
        write(tmp_path, {"fc.weight": mx.zeros(1)}, {"model_type": "qwen3_5_mtp", **damaged})
        with pytest.raises(CheckpointError, match=f"{tmp_path}: mlx-lm cannot build a draft head"):
            MTPDraft(tmp_path)
    fp8 = {"model_type": "qwen3_5_mtp", "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(CheckpointError, match="are in fp8, of.*made for MLX"):
        MTPDraft(write(tmp_path, {"fc.weight": mx.zeros(1)}, fp8))


PUBLISHED = {  # by norm: lowest and highest mean of its weights, less 1, in heads of Qwen3.5, 3.6
    "t.self_attn.q_norm": (0.73, 0.79), "t.self_attn.k_norm": (0.73, 0.78),
    "t.input_layernorm": (0.03, 0.39), "t.post_attention_layernorm": (0.21, 0.39),
    "t.norm": (1.25, 2.58), "norm_hidden": (-0.51, -0.16), "norm_embedding": (-0.73, -0.46),
}  # fmt: skip


@pytest.mark.parametrize("in_a_layer", [0, 1])
@pytest.mark.parametrize("others", [0, 1])
def test_the_values_say_whether_a_norm_has_its_1(in_a_layer, others):
    """Converters add 1 to all norms, to none, to the layer's norms only or to the others only."""
    added = {
        f"{k}.weight": in_a_layer if "_attn" in k or "_lay" in k else others for k in PUBLISHED
    }
    for means in zip(*PUBLISHED.values()):
        norms = {k: mx.full(8, mean + a) for mean, (k, a) in zip(means, added.items())}
        assert {k: _less_one(k, norms) for k in norms} == {k: not a for k, a in added.items()}


# The trained head


WITH, LESS_1 = "nothing", "norm"  # patterns of the norms that are stored minus 1
STORED = {  # forms of tiny-mtp in 4 bits: model_type, prefix, norms that are stored minus 1
    "as it is": ("qwen3_5_mtp", "", WITH),
    "alone, raw": ("qwen3_5_mtp", "", LESS_1),
    "raw": ("qwen3_5_moe", "mtp.", LESS_1),
    "with its 1": ("qwen3_5_moe", "mtp.", WITH),
    "in a language model": ("qwen3_5_moe", "language_model.mtp.", WITH),
    "in a model's language model": ("qwen3_5_moe", "model.language_model.mtp.", LESS_1),
    "in a model": ("qwen3_5_moe", "model.mtp.", WITH),
    "a layer's norms raw": ("qwen3_5_moe", "mtp.", r"layers.*norm"),
    "the others raw": ("qwen3_5_moe", "model.mtp.", r"^(pre_fc_)?norm"),
    "one raw": ("qwen3_5_moe", "mtp.", r"norm_hidden|k_norm"),
    "another model's": ("qwen3_5_mtp", "", WITH),
}


@pytest.mark.parametrize("form", STORED)
def test_a_strangers_head_is_found_and_its_drafts_accepted(form, tmp_path, capsys):
    (model_type, prefix, less), weights = STORED[form], mx.load(str(HEAD / "model.safetensors"))
    weights = {k: w - 1 if "norm" in k and re.search(less, k) else w for k, w in weights.items()}
    if form == "another model's":
        weights["fc.scales"], weights["fc.biases"] = -weights["fc.scales"], -weights["fc.biases"]
    config = json.loads((HEAD / "config.json").read_text()) | {"model_type": model_type}
    write(tmp_path, {prefix + k: w for k, w in weights.items()}, config)
    made = steps(trained(), texts(2)[0], MTPDraft(tmp_path), 3, 26)
    rounds = {round.number: round for *_, round in made}.values()
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    said = capsys.readouterr().err
    if form == "another model's":
        assert re.fullmatch(f"moelab: {tmp_path}: 0% of .* head's first 6. drafts .*\\n", said)
    else:
        assert accepted / drafted > 0.5 and not said


MODES = [("resident", 16), ("fused", 16), ("stacked", 48)]
MORE = [("fused", 48), ("stacked", 16), ("buffers", 16), ("serial", 16)]


@pytest.mark.parametrize("mode, slots", MODES if FAST else MODES + MORE)
@pytest.mark.parametrize("n", [1, 3, "auto"])
def test_text_and_cache_are_as_without_guesses(mode, slots, n):
    """The text is the target's; the head's cache equals that of one call on the text."""
    model, tokens = trained(mode, slots=slots), 24 if FAST else 300
    for prompt in texts(2 if FAST else 20 if n == 3 and mode != "serial" else 4):
        draft, own = MTPDraft(HEAD), make_prompt_cache(model)
        cache = [*own, *draft.make_cache()]
        made = [t for t, *_ in steps(model, prompt, draft, n, tokens, prompt_cache=cache)]
        assert made == plain(model, prompt, tokens)
        sampled = {"max_tokens": tokens, "sampler": make_sampler(0.6)}
        mx.random.seed(7)
        expected, again = plain(model, prompt, **sampled), MTPDraft(HEAD)
        mx.random.seed(7)
        assert [t for t, *_ in steps(model, prompt, again, n, **sampled)] == expected
        with Capture(model, draft.layer_ids) as heard:
            model(mx.array([[*prompt, *made]]), cache=make_prompt_cache(model))
        again = MTPDraft(HEAD)
        again.bind(model)
        again.extend(mx.array([*prompt, *made], mx.uint32), heard.features[0])
        again.propose(0, 0, None)
        largest = max(mx.abs(a).max().item() for c in again.cache for a in seen(c))
        assert difference(cache[len(own) :], again.cache) < 1e-4 * largest


def test_an_interrupt_at_any_line_leaves_model_and_head_usable():
    model, draft, prompt = trained("fused"), MTPDraft(HEAD), texts(2, 8)[0]
    wanted, places, step = plain(model, prompt, 5), 0, 97 if FAST else 1
    for where in at_every_line(speculation, step, lambda: steps(model, prompt, draft, 3, 5)):
        assert [t for t, *_ in steps(model, prompt, draft, 3, 5)] == wanted, where
        places += 1
    assert step * places >= 300


def test_texts_in_turn_go_on_from_their_caches_in_another_thread():
    model, draft, prompts = trained("fused"), MTPDraft(HEAD), texts(2)
    own = [make_prompt_cache(model) for _ in prompts]
    drafted = [[*make_prompt_cache(model), *draft.make_cache()] for _ in prompts]
    for given in (prompts, [[17, 5], [300]], [[9], [21, 4, 8]]):
        for i, ids in enumerate(given):
            with ThreadPoolExecutor(1) as thread:
                run = thread.submit(steps, model, ids, draft, 3, 12, prompt_cache=drafted[i])
            expected = plain(model, ids, 12, prompt_cache=own[i])
            assert [t for t, *_ in run.result()] == expected

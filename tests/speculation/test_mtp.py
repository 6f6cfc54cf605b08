"""A model's own draft head: its equations against others' code, its cache, and whole texts."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import build
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from moelab.checkpoint import CheckpointError, model_classes
from moelab.speculation.mtp import NEXTN, MTPDraft, load_head

TINY_MOE = Path(__file__).parents[2] / "data" / "models" / "tiny-moe"
T = 9


def random_weights(module, seed=1):
    """Random weights for the parameters of a module, by name; norms are near 1."""
    mx.random.seed(seed)
    shapes = {k: p.shape for k, p in tree_flatten(module.parameters())}
    return {k: 0.1 * mx.random.normal(s) + ("norm" in k and len(s) == 1) for k, s in shapes.items()}


def write(folder, weights, config, file="model.safetensors"):
    mx.save_safetensors(str(folder / file), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def qwen_head(config):
    """mlx-vlm's head for a configuration of Qwen3.5's text model, and its weights by name."""
    pytest.importorskip("mlx_vlm")
    from mlx_vlm.speculative.drafters.qwen3_5_mtp import ModelConfig
    from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

    head = Qwen3_5MTPDraftModel(ModelConfig.from_dict({"text_config": dict(config)}))
    weights = random_weights(head)
    head.load_weights(list(weights.items()))
    return head, weights


def in_original_form(name, weights):
    """A sidecar's tensors as the original checkpoints of a Qwen family store them."""
    raw = {f"mtp.{k}": w - 1 if w.ndim == 1 and "norm" in k else w for k, w in weights.items()}
    mlp = "mtp.layers.0.mlp."
    found = {p: raw.pop(f"{mlp}switch_mlp.{p}_proj.weight") for p in ("gate", "up", "down")}
    if name == "qwen3_next":
        each = {
            f"{mlp}experts.{e}.{p}_proj.weight": w[e]
            for p, w in found.items()
            for e in range(len(w))
        }
        return raw | each
    raw[f"{mlp}experts.gate_up_proj"] = mx.concatenate([found["gate"], found["up"]], axis=1)
    return raw | {f"{mlp}experts.down_proj": found["down"]}


def same(head, expected, D):
    """Whether a head gives what ``expected(embedded, hidden)`` does, read in two parts."""
    mx.random.seed(2)
    embedded, hidden = mx.random.normal((1, T, D)), mx.random.normal((1, T, D))
    cache, wanted = make_prompt_cache(head), expected(embedded, hidden)
    parts = [head(embedded[:, a:b], hidden[:, a:b], cache) for a, b in ((0, 4), (4, 5), (5, T))]
    return mx.abs(mx.concatenate(parts, axis=1) - wanted).max().item() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "sidecar"])
def test_a_head_of_qwen_computes_as_in_mlx_vlm(name, tmp_path):
    config = json.loads((TINY_MOE / "config.json").read_text())["text_config"]
    theirs, weights = qwen_head(config)
    told = {"model_type": name, "text_config": config}
    if name == "sidecar":
        told = {"model_type": "qwen3_5_mtp", "text_config": config}
    elif name == "qwen3_next":
        rope = config["rope_parameters"]
        flat = {k: rope[k] for k in ("rope_theta", "partial_rotary_factor")}
        told = {**config, **flat, "model_type": name, "mlp_only_layers": []}
    stored = weights if name == "sidecar" else in_original_form(name, weights)
    head = load_head(write(tmp_path, stored, told))

    def expected(embedded, hidden):
        return theirs._forward_hidden(embedded, hidden, theirs.make_cache(), mx.arange(T)[None])

    assert same(head, expected, config["hidden_size"])


@pytest.mark.parametrize("name", NEXTN)
def test_a_head_in_the_layer_after_the_last(name, tmp_path):
    """Against the family's own model of one layer more, whose last layer is the head's."""
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
    raw |= {
        f"{path}{k}.weight": 0.1 * mx.random.normal(s) + (len(s) == 1) for k, s in extra.items()
    }
    head = load_head(write(tmp_path, raw, config))
    more.load_weights(list(more.sanitize(dict(raw)).items()), strict=False)

    def norm(x, part):
        return mx.fast.rms_norm(x, raw[f"{path}{part}.weight"], args.rms_norm_eps)

    def expected(embedded, hidden):
        both = mx.concatenate([norm(embedded, "enorm"), norm(hidden, "hnorm")], axis=-1)
        mask = nn.MultiHeadAttention.create_additive_causal_mask(T) == 0
        x = both @ raw[f"{path}eh_proj.weight"].T
        return norm(more.model.layers[L](x, mask, None), "shared_head.norm")

    assert same(head, expected, D)


def test_a_folder_without_a_head_and_a_family_without_one_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="expected tensors mtp"):
        MTPDraft(TINY_MOE)
    write(tmp_path, {"a": mx.zeros(1)}, {"model_type": "gpt_oss", "num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="gpt_oss is not known here: expected one of qwen3"):
        MTPDraft(tmp_path)

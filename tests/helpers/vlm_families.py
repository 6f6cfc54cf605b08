"""mlx-vlm's families with experts, as tiny random checkpoints in mlx-vlm's own layout.

FAMILIES[name]                  what its config says beyond ``families.COMMON``
REFUSED[name]                   families that moelab refuses, and the words that say why
write_checkpoint(name, path)    writes experts and n-gram tables in 4 bits; returns mlx-vlm's model
"""

import copy
import importlib
import json
import pkgutil
from pathlib import Path

import families
import mlx.core as mx
import mlx.nn as nn
from families import KINDS, VOCAB, YARN, K
from mlx.utils import tree_flatten, tree_map
from mlx_vlm import models, utils
from mlx_vlm.models.switch_layers import SwitchLinear

from moelab.checkpoint import vlm

ROPE = {"rope_type": "default", "type": "default", "rope_theta": 1e4}
ROPE |= {"mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}
QWEN = {"layer_types": None, "rope_scaling": ROPE, "rope_parameters": ROPE}
GREEDY = {"topk_method": "greedy", "rope_scaling": YARN}
SEES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_heads": 2}
SEES |= {"depth": 1, "num_hidden_layers": 1, "patch_size": 4, "image_size": 16}
PROJECTS = {"projector_config": {}, "vision_config": {"model_type": "vision"}}
LLAMA4 = {"initializer_range": 0.02, "norm_eps": 1e-5, "num_channels": 3, "rope_theta": 1e4}
LLAMA4 |= {"pixel_shuffle_ratio": 0.5, "projector_input_dim": 32, "projector_output_dim": 32}
LLAMA4 |= {"vision_feature_layer": -1, "vision_output_dim": 32, "projector_dropout": 0.0}
LLAMA4 |= {"vision_feature_select_strategy": "default"}
NGRAMS = {"ple_layer_ids": [1], "ple_embed_dim": 64, "heads_per_ngram": 1, "eos_token_id": 2}
NGRAMS |= {"ngram_vocab_size_base": 500, "split_ngram_parts": 3}

THEIRS = {m.name for m in pkgutil.iter_modules(models.__path__)}
# Names of mlx-lm's families that in mlx-vlm have no experts, are no model or run on no CPU.
OTHER = {"deepseek_v41", "mistral4", "muse_spark", "prism_hadamard_qwen35", "qwen3_5"}
# The keys in each family's config.json, or in its ``text_config``, beside ``COMMON``. A family that
# mlx-lm has, too, has the config of mlx-lm's family unless it stands here.
FAMILIES = {
    **{name: own for name, own in families.FAMILIES.items() if name in THEIRS - OTHER},
    **{name: {} for name in ("cohere2_moe", "flint", "hy_v4", "klear", "kolibri1", "youtu_vl")},
    "deepseek_v4": {"num_hash_layers": 2},
    "deepseek_vl_v2": {"text_config": GREEDY, **PROJECTS},
    "deepseekocr": {"text_config": GREEDY | {"q_lora_rank": None}, **PROJECTS},
    "glm4v_moe": {
        "text_config": {"use_qk_norm": True, "partial_rotary_factor": 0.5, **QWEN},
        "vision_config": {"model_type": "glm4v_moe", **SEES},
    },
    "glm5_next": {"text_config": {
        "num_key_value_heads": 4, "qk_rope_head_dim": 0, "index_kpool": 2, "mla_use_nope": True,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    }},
    "llama4": {**families.FAMILIES["llama4"],
               "vision_config": {"model_type": "llama4", **SEES, **LLAMA4}},
    "longcat_flash_sparse": {"moe_topk": K},
    "mimo_v2": {"text_config": {"moe_layer_freq": [0, 1], "scoring_func": "sigmoid",
                                "partial_rotary_factor": 0.5}},
    "minimax_m3": families.FAMILIES["minimax_m3_vl"]["text_config"],
    "moondream3": {"text_config": {"num_key_value_heads": 4, "moe_start_layer": 1, "rope_dim": 8}},
    "qwen3_5_moe": {"text_config": QWEN}, "qwen3_5_moe_text": QWEN,
    "qwen3_vl_moe": {"text_config": QWEN},
    "qwen4_exp": {"text_config": {
        **QWEN, **NGRAMS, "layer_types": ["linear_attention", KINDS[1]], "hc_count": 2,
        "hc_lowrank": 16, "indexer_n_heads": 2, "indexer_head_dim": 16, "indexer_budget": 16,
    }},
    "step3p7": {"text_config": {"moe_top_k": K, "moe_layers_enum": [1], "moe_num_experts": 8}},
}  # fmt: skip
REFUSED = {
    "moondream3": "MoEMLP .* expected experts of the shape .* got fc1, fc2, router, called with x",
    "granitemoe": "mlx-vlm .* gives another text: .*. mlx-lm has this family",
    "inkling": "No module named 'mlx_audio'",
    "qwen4_exp_mtp": "expected a model, got a draft head",
}
NAMES = sorted(FAMILIES.keys() - REFUSED.keys())
# Families that moelab refuses drafts for, because the families' caches merge tokens.
UNDRAFTED = {"glm5_next"}


def config_of(name: str) -> dict:
    """The config.json of a tiny model of a family."""
    own = FAMILIES.get(name, {"text_config": {}})
    outer = {"vocab_size": VOCAB, "vision_config": {}} if "text_config" in own else {}
    return outer | families.config_of(name, own)


def write_checkpoint(name: str, path: Path) -> nn.Module:
    """Write a random checkpoint, and return mlx-vlm's model of it, in float32."""
    config = config_of(name)
    library = importlib.import_module(f"mlx_vlm.models.{name}")
    given = {"vision_config": {}, "text_config": {}, "audio_config": {}} | copy.deepcopy(config)
    made = library.ModelConfig.from_dict(given)
    model = library.Model(utils.update_module_configs(made, library, given, vlm.PARTS))
    mx.random.seed(1)
    text = model.language_model

    def draw(a):
        if not mx.issubdtype(a.dtype, mx.floating):
            return a
        return 0.05 * mx.random.normal(a.shape) + (a.ndim == 1)

    text.update(tree_map(draw, text.parameters()))

    def takes(path, module):
        packs = isinstance(module, SwitchLinear) or "ngram_embedding.shards" in path
        return packs and module.weight.shape[-1] % 32 == 0

    nn.quantize(text, 32, 4, class_predicate=takes)
    config["quantization"] = {"bits": 4, "group_size": 32, "mode": "affine"}
    prefix = next(child for child, module in model.items() if module is text)
    families.write_files(path, dict(tree_flatten({prefix: text.parameters()})), dict(config))
    (path / "config.json").write_text(json.dumps(config))  # mlx-lm leaves out its vision_config
    return model.eval()

"""Every mlx-lm family built on SwitchGLU or SwitchMLP, as a tiny random checkpoint.

    FAMILIES[name]                          how a small model of the family is configured
    NOT_STREAMED[name]                      families that moelab refuses, each with its reason
    write_checkpoint(name, path, variant)   the checkpoint on disk, in mlx-lm's own layout

``tests/streaming/test_families.py`` fails while mlx-lm has a family that is not listed here. For
a new one add an entry to ``FAMILIES`` with what its config.json needs beyond ``COMMON``; the test
then runs it in every mode. Its own name for K goes into ``TOP_K_KEYS`` of
``moelab/streaming/build.py``, a new name of its router's weight into ``ROUTERS``. A family that
cannot stream goes into ``NOT_STREAMED`` with its reason, one that a CPU cannot run into
``EXPERTS_ONLY``.

Every config has D = 64, E = 8, K = 2, unless its family allows only something else. ``COMMON`` has
every family's name for the same quantity, and mlx-lm drops the names that a family does not know.
"""

import ast
import contextlib
import copy
import io
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from moelab.streaming.build import TOP_K_KEYS

D, F, E, K, VOCAB = 64, 64, 8, 2, 96

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    # experts
    "num_experts": E,
    "n_routed_experts": E,
    "num_local_experts": E,
    "num_experts_per_tok": K,
    "moe_intermediate_size": F,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": F,
    "moe_shared_expert_intermediate_size": F,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    # multi-head latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # gated delta net
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}

SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
LONGCAT = {
    "ffn_hidden_size": 96,
    "moe_topk": K,
    "expert_ffn_hidden_size": F,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
KDA = {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
MISTRAL4_ROPE = {
    "rope_theta": 10000.0,
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GEMMA4 = {
    "enable_moe_block": True,
    "top_k_experts": K,
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 8,
    "layer_types": SLIDING_THEN_FULL,
    "tie_word_embeddings": True,
}


# A family with one of these names for K does not get the usual one from ``COMMON``.
OWN_TOP_K_KEYS = {*TOP_K_KEYS} - {"num_experts_per_tok", "experts_per_token"}


@dataclass(frozen=True)
class Family:
    """What a family's config says beyond ``COMMON``."""

    config: dict = field(default_factory=dict)  # keys at the top of config.json
    text: dict | None = None  # keys of text_config; COMMON goes there, as in multimodal checkpoints

    def build_config(self, model_type: str) -> dict:
        own = self.config if self.text is None else self.text
        other_names = {"num_experts_per_tok"} if own.keys() & OWN_TOP_K_KEYS else set()
        common = {k: v for k, v in COMMON.items() if k not in other_names}
        if self.text is None:
            config = {**common, "model_type": model_type, **self.config}
        else:
            config = {
                "model_type": model_type,
                "text_config": {**common, "model_type": model_type, **self.text},
                **self.config,
            }
        return copy.deepcopy(config)


FAMILIES = {
    "Klear": Family(),
    "afmoe": Family({"layer_types": SLIDING_THEN_FULL, "num_dense_layers": 1, "sliding_window": 8}),
    "bailing_hybrid": Family({"layer_group_size": 2, "group_norm_size": 2, "num_hidden_layers": 3}),
    "bailing_moe": Family({"rope_scaling": None}),
    "bailing_moe_linear": Family(
        {"layer_group_size": 2, "group_norm_size": 2, "num_hidden_layers": 3}
    ),
    "bailing_moe_v3": Family(
        {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid",
         "layer_group_size": 2, "num_hidden_layers": 3}
    ),
    "deepseek": Family(),
    "deepseek_v2": Family(
        {"topk_method": "greedy",
         "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256,
                          "mscale": 1.0, "mscale_all_dim": 1.0}}
    ),
    "deepseek_v3": Family(),
    "deepseek_v32": Family({"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}),
    "deepseek_v41": Family(
        {"head_dim": 32, "o_groups": 2, "o_lora_rank": 32, "sliding_window": 8,
         "compress_ratios": [0, 0], "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
    ),
    "dots1": Family({"scoring_func": "noaux_tc"}),
    "ernie4_5_moe": Family(
        {"use_bias": True, "moe_num_experts": E, "moe_k": K, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 0}
    ),
    "exaone_moe": Family(
        {"layer_types": SLIDING_THEN_FULL, "is_moe_layer": [True, True], "sliding_window": 8}
    ),
    "gemma4": Family({"vocab_size": VOCAB}, text={**GEMMA4, "model_type": "gemma4_text"}),
    "gemma4_text": Family(GEMMA4),
    "glm4_moe": Family({"use_qk_norm": True, "rope_scaling": None, "partial_rotary_factor": 0.5}),
    "glm4_moe_lite": Family(),
    "glm_moe_dsa": Family(
        {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4, "topk_method": "noaux_tc",
         "scoring_func": "sigmoid",
         "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    ),
    "gpt_oss": Family(
        {"sliding_window": 8, "intermediate_size": F, "layer_types": SLIDING_THEN_FULL}
    ),
    "granitemoe": Family(
        {"intermediate_size": F, "logits_scaling": 1.0, "attention_multiplier": 0.25,
         "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
    ),
    "granitemoehybrid": Family(
        {"logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 2.0,
         "residual_multiplier": 0.5, "layer_types": ["mamba", "attention"],
         "shared_intermediate_size": 64, "mamba_n_heads": 4, "mamba_d_head": 32,
         "mamba_proj_bias": False, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
         "mamba_conv_bias": True}
    ),
    "hunyuan": Family(
        {"moe_topk": K, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True,
         "use_cla": False, "cla_share_factor": 2,
         "rope_scaling": {"factor": 1.0, "type": "dynamic", "alpha": 1000.0}}
    ),
    "jamba": Family(
        {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 0,
         "expert_layer_period": 1, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2}
    ),
    "kimi_k25": Family({}, text={}),
    "kimi_k3": Family(
        {},
        text={"model_type": "kimi_linear", "linear_attn_config": KDA, "num_experts_per_token": K,
              "mla_use_output_gate": True, "activation_situ_beta": 1.0, "attn_res_block_size": 2,
              "routed_expert_hidden_size": 32, "latent_moe_use_norm": True}
    ),
    "kimi_linear": Family(
        {"linear_attn_config": KDA, "model_max_length": 512, "num_experts_per_token": K}
    ),
    "kimi_vl": Family({}, text={}),
    "laguna": Family({"layer_types": SLIDING_THEN_FULL, "sliding_window": 8}),
    "lfm2_moe": Family(
        {"layer_types": ["conv", "full_attention"], "use_expert_bias": True, "num_dense_layers": 1,
         "norm_eps": 1e-5, "conv_bias": True, "conv_L_cache": 3}
    ),
    "llama4": Family(
        {},
        text={"attention_chunk_size": 64, "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
              "intermediate_size": F, "intermediate_size_mlp": 96, "num_experts_per_tok": 1,
              "rope_scaling": None, "use_qk_norm": True}
    ),
    "longcat_flash": Family({**LONGCAT, "attention_method": "MLA", "zero_expert_type": "identity"}),
    "longcat_flash_ngram": Family({**LONGCAT, "ngram_vocab_size_ratio": 2}),
    "mellum": Family(
        {"layer_types": SLIDING_THEN_FULL, "sliding_window": 8,
         "rope_parameters": {kind: {"rope_theta": 10000.0, "rope_type": "default"}
                             for kind in SLIDING_THEN_FULL}}
    ),
    "mimo_v2_flash": Family(
        {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1],
         "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
         "sliding_window_size": 8, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
         "layernorm_epsilon": 1e-5, "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4,
         "swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_v_head_dim": 16,
         "partial_rotary_factor": 0.5}
    ),
    "minimax": Family({"shared_intermediate_size": 0, "rotary_dim": 8, "intermediate_size": F}),
    "minimax_m3_vl": Family(
        {},
        text={"intermediate_size": F, "moe_layer_freq": [0, 1], "dense_intermediate_size": 96,
              "shared_intermediate_size": 64}
    ),
    "mistral3": Family({}, text={"model_type": "mistral4", "rope_parameters": MISTRAL4_ROPE}),
    "mistral4": Family({"rope_parameters": MISTRAL4_ROPE}),
    "mixtral": Family({"intermediate_size": F}),
    "muse_spark": Family(
        {},
        text={"post_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0},
              "layer_rope_theta": [10000.0, 10000.0], "layer_types": SLIDING_THEN_FULL,
              "sliding_window": 8, "final_logit_softcapping": 30.0, "output_multiplier": 1.0,
              "moe_hidden_size": 64, "num_shared_experts": 0}
    ),
    "nemotron_h": Family(
        {"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 16,
         "conv_kernel": 4, "n_groups": 2, "mlp_bias": False, "layer_norm_epsilon": 1e-5,
         "use_bias": False, "use_conv_bias": True, "hybrid_override_pattern": ["M", "E", "*", "E"]}
    ),
    "olmoe": Family({"intermediate_size": F}),
    "phimoe": Family(
        {"intermediate_size": F,
         "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "short_mscale": 1.0,
                          "long_mscale": 1.0, "type": "longrope"}}
    ),
    "phixtral": Family(
        {"num_vocab": VOCAB, "model_dim": D, "num_heads": 4, "num_layers": 2, "rotary_dim": 8}
    ),
    "prism_hadamard_qwen35": Family(
        {"schema_version": 1, "tensor_namespace": "mlx-lm-text",
         "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
         "modules": [{"path": "model.layers.1.self_attn.o_proj", "embedding": False,
                      "dtype": "float16", "block": 0}]},
        text={"hidden_size": 128, "head_dim": 32},
    ),
    "qwen2_moe": Family(),
    "qwen3_5": Family({}, text={}),
    "qwen3_5_moe": Family({}, text={}),
    "qwen3_moe": Family(),
    "qwen3_next": Family({"partial_rotary_factor": 0.5}),
    "qwen3_vl_moe": Family({}, text={}),
    "solar_open": Family({"partial_rotary_factor": 1.0}),
    "step3p5": Family(
        {"num_attention_groups": 2, "sliding_window": 8, "moe_num_experts": E, "moe_top_k": K,
         "share_expert_dim": 64, "layer_types": SLIDING_THEN_FULL}
    ),
}  # fmt: skip


# Families with experts that moelab does not stream, and why.
NOT_STREAMED = {"dbrx": "its experts are modules of their own, not one SwitchGLU or SwitchMLP"}
NOT_STREAMED_CONFIG = {
    "dbrx": {
        "vocab_size": VOCAB,
        "d_model": D,
        "n_layers": 2,
        "n_heads": 4,
        "ffn_config": {"moe_num_experts": E, "moe_top_k": K, "ffn_hidden_size": F},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    }
}

# Families that mlx-lm cannot run on a CPU. Their experts are tested without the rest of the model.
EXPERTS_ONLY = {"muse_spark": "mlx-lm's muse_spark calls Metal kernels outside the experts"}

# The variants that ``write_checkpoint`` writes. "mode", "bits" and "group_size" are mlx-lm's,
# "dtype" is the type of what is not quantized.
VARIANTS = {
    "affine4": {"bits": 4, "group_size": 32, "mode": "affine"},
    "affine8": {"bits": 8, "group_size": 64, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    "nvfp4_global": {"bits": 4, "group_size": 16, "mode": "nvfp4", "global_scale": True},
    "mixed": {"bits": 4, "group_size": 32, "mode": "affine", "mixed": True},
    "sharded": {"bits": 4, "group_size": 32, "mode": "affine", "shards": 3},
    "plain": {"dtype": mx.bfloat16},
    "plain32": {"dtype": mx.float32, "shards": 2},
}


# How the names of the families' router weights end.
ROUTERS = (
    "gate.weight",
    "router.weight",
    "router.proj.weight",
    "router.layer.weight",
    "classifier.weight",
    "gate.wg.weight",
)


def mentions_experts() -> set[str]:
    """The mlx-lm model files that mention experts and are not found by ``discover``."""
    files = {
        p.stem for p in Path(mlx_lm.models.__path__[0]).glob("*.py") if "experts" in p.read_text()
    }
    return files - discover() - {"switch_layers"}


def discover() -> set[str]:
    """The mlx-lm model files whose models can hold a SwitchGLU or SwitchMLP.

    Follows imports from ``switch_layers``: a file counts if it imports one of the two classes, or
    anything from a file that counts, and defines ``Model`` and ``ModelArgs``.
    """
    imports, has_model, counts = {}, set(), set()
    for path in Path(mlx_lm.models.__path__[0]).glob("*.py"):
        tree = ast.parse(path.read_text())
        imports[path.stem] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = {alias.name for alias in node.names}
                imports[path.stem] |= {node.module} if node.module else names
                if node.module == "switch_layers" and names & {"SwitchGLU", "SwitchMLP"}:
                    counts.add(path.stem)
        names = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
        imported = (a for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names)
        names |= {a.asname or a.name for a in imported}
        if {"Model", "ModelArgs"} <= names:
            has_model.add(path.stem)
    while grown := {name for name, seen in imports.items() if seen & counts} - counts:
        counts |= grown
    return counts & has_model


def build(name: str) -> tuple[nn.Module, dict]:
    """A random float32 model of the family, no parameter all zeros or ones, and its config."""
    mx.random.seed(zlib.crc32(name.encode()))
    config = FAMILIES[name].build_config(name)
    model_class, args_class = mlx_lm_utils._get_classes(copy.deepcopy(config))
    model = model_class(args_class.from_dict(copy.deepcopy(config)))

    def disturb(path, p):
        if not mx.issubdtype(p.dtype, mx.floating):
            return p
        if path.endswith("correction_bias") or path.endswith("expert_bias"):
            # With more noise every token chooses the same experts.
            return (p + 0.01 * mx.random.normal(p.shape)).astype(p.dtype)
        if p.ndim == 1 or path.endswith(".bias"):
            return (p + 0.1 * mx.random.normal(p.shape)).astype(p.dtype)
        if path.endswith(ROUTERS):
            # Tokens must differ in the experts that they choose.
            return p + 0.5 * mx.random.normal(p.shape)
        return p

    model.update(tree_map_with_path(disturb, model.parameters()))
    mx.eval(model.parameters())
    return model, config


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold experts, by path, in the order of the layers."""
    modules = reversed(list(model.named_modules()))
    return {path: m for path, m in modules if isinstance(m, (SwitchGLU, SwitchMLP))}


def write_checkpoint(name: str, path: Path, variant: str) -> Path:
    """Write a random checkpoint of a family, as ``mlx_lm.convert`` would, and return its folder."""
    spec = VARIANTS[variant]
    model, config = build(name)
    # mlx-lm and real checkpoints keep some tensors in float32 (a model's cast_predicate).
    keep = getattr(model, "cast_predicate", lambda _: True)
    dtype = spec.get("dtype", mx.bfloat16)
    model.update(
        tree_map_with_path(
            lambda p, a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) and keep(p) else a,
            model.parameters(),
        )
    )
    if "bits" in spec:
        own = getattr(model, "quant_predicate", None)
        experts = list(expert_modules(model))

        def predicate(module_path, module):
            if spec.get("mixed") and module_path.startswith(tuple(f"{e}." for e in experts)):
                if module_path.startswith(experts[-1]) and module_path.endswith(
                    ("down_proj", "fc2")
                ):
                    return {"bits": 8, "group_size": 64, "mode": "affine"}
                return not module_path.endswith("gate_proj")  # one projection is not quantized
            return own(module_path, module) if own is not None else True

        # prism describes its own packed layers here, which are not changed.
        packed = config.pop("quantization", None)
        with contextlib.redirect_stdout(io.StringIO()):
            model, config = mlx_lm_utils.quantize_model(
                model,
                config,
                spec["group_size"],
                spec["bits"],
                mode=spec["mode"],
                global_scale=spec.get("global_scale", False),
                quant_predicate=predicate,
            )
        if packed is not None:
            config["quantization"] = packed
    weights = dict(tree_flatten(model.parameters()))
    write_files(path, weights, config, shards=spec.get("shards", 1))
    return path


def per_expert(prefix: str, names: dict[str, str]):
    """The layout with a tensor for each expert, ``{prefix}.{e}.{name}.{kind}``.

    ``names`` has the file's name of each of mlx-lm's projections.
    """

    def convert(module, tensors):
        parent = module.rsplit(".", 1)[0]
        return {
            f"{parent}.{prefix}.{e}.{names[p]}.{kind}": a[e]
            for (p, kind), a in tensors.items()
            for e in range(a.shape[0])
        }

    return convert


def gate_up(
    gate_up_name: str, down_name: str, *, transposed: bool = False, interleaved: bool = False
):
    """The layouts with gate and up in one tensor.

    It is ``[E, 2F, D]`` in halves or, ``interleaved``, in alternate rows; ``transposed``, it is
    ``[E, D, 2F]``.
    """

    def convert(module, tensors):
        parent = module.rsplit(".", 1)[0]
        named = (
            {"weight": "", "scales": "_scales", "bias": "_bias"} if interleaved else {"weight": ""}
        )
        out = {}
        for kind in {kind for _, kind in tensors}:
            gate, up, down = (tensors[p, kind] for p in ("gate_proj", "up_proj", "down_proj"))
            if interleaved:
                both = mx.stack([gate, up], axis=2).reshape(
                    gate.shape[0], 2 * gate.shape[1], *gate.shape[2:]
                )
            else:
                both = mx.concatenate([gate, up], axis=1)
            if kind == "weight" and interleaved:  # gpt-oss: mxfp4 in blocks of 32, 16 bytes each
                both, down = (a.view(mx.uint8).reshape(*a.shape[:2], -1, 16) for a in (both, down))
            if transposed:
                both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
            suffix = "_blocks" if kind == "weight" and interleaved else named[kind]
            out[f"{parent}.{gate_up_name}{suffix}"] = mx.contiguous(both)
            out[f"{parent}.{down_name}{suffix}"] = mx.contiguous(down)
        return out

    return convert


GATE_UP_DOWN = {p: p for p in ("gate_proj", "up_proj", "down_proj")}

# Families in the layout of the checkpoints that their authors publish, which mlx-lm's ``sanitize``
# rearranges: the variant that such a file has, and how it stores the experts of one module.
HUGGING_FACE = {
    "mixtral": (
        "affine4",
        per_expert("experts", {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}),
    ),
    "qwen3_moe": ("plain", per_expert("experts", GATE_UP_DOWN)),
    "nemotron_h": ("plain", per_expert("experts", {"fc1": "up_proj", "fc2": "down_proj"})),
    "phixtral": ("plain", per_expert("mlp", {"fc1": "fc1", "fc2": "fc2"})),
    "qwen3_5_moe": ("plain", gate_up("experts.gate_up_proj", "experts.down_proj")),
    "granitemoe": ("plain", gate_up("input_linear.weight", "output_linear.weight")),
    "gpt_oss": ("mxfp4", gate_up("experts.gate_up_proj", "experts.down_proj", interleaved=True)),
    "llama4": ("plain", gate_up("experts.gate_up_proj", "experts.down_proj", transposed=True)),
    "qwen3_vl_moe": (
        "plain",
        gate_up("experts.gate_up_proj", "experts.down_proj", transposed=True),
    ),
}


# Those of them in which an expert's gate or up is not contiguous, so that it cannot be streamed.
REARRANGED = {
    "gpt_oss": "gate and up alternate row by row",
    "llama4": "experts are stored transposed",
    "qwen3_vl_moe": "experts are stored transposed",
}


def write_hugging_face(name: str, path: Path) -> Path:
    """A checkpoint in its authors' layout, with the same numbers as ``write_checkpoint``'s."""
    variant, convert = HUGGING_FACE[name]
    write_checkpoint(name, path, variant)
    config = json.loads((path / "config.json").read_text())
    weights = mx.load(str(path / "model.safetensors"))
    model, _ = mlx_lm_utils.load_model(path, lazy=True)
    for module in expert_modules(model):
        tensors = {
            tuple(k[len(module) + 1 :].split(".")): weights.pop(k)
            for k in list(weights)
            if k.startswith(f"{module}.")
        }
        weights.update(convert(module, tensors))
    if name in ("qwen3_5_moe", "qwen3_vl_moe"):  # these two words change places
        weights = {
            k.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head", "lm_head"
            ): w
            for k, w in weights.items()
        }
        # They see, too. Of images mlx-lm leaves all out.
        weights["model.visual.blocks.0.norm1.weight"] = mx.ones(8)
        config["vision_config"] = {"depth": 1, "hidden_size": 8}
    if name == "gpt_oss":
        config.pop("quantization"), config.pop("quantization_config")
        config["quantization_config"] = {"quant_method": "mxfp4"}
    write_files(path, weights, config)
    return path


def write_files(path: Path, weights: dict[str, mx.array], config: dict, shards: int = 1) -> None:
    """Write config.json, the weights in ``shards`` files and their index.

    Neighbours in the model are in different files.
    """
    path.mkdir(parents=True, exist_ok=True)
    mlx_lm_utils.save_config(config, path / "config.json")
    names = sorted(weights)
    files = {
        f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        if shards > 1
        else "model.safetensors": names[i::shards]
        for i in range(shards)
    }
    for file, inside in files.items():
        mx.save_safetensors(
            str(path / file), {n: weights[n] for n in inside}, metadata={"format": "mlx"}
        )
    index = {
        "metadata": {"total_size": sum(w.nbytes for w in weights.values())},
        "weight_map": {n: f for f, inside in files.items() for n in inside},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def load_resident(path: Path) -> nn.Module:
    """Plain mlx-lm, every expert in memory, float32: the reference for the streamed modes."""
    model, _ = mlx_lm_utils.load_model(path)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


COMMON_VARIANTS = ("affine4", "affine8", "mxfp4", "mixed", "sharded", "plain")


def variant_of(name: str) -> str:
    """One variant for every family, by its name: a new family does not change another's."""
    return COMMON_VARIANTS[zlib.crc32(name.encode()) % len(COMMON_VARIANTS)]


# These families' experts differ: gate/up/down, the same in a hybrid, with additive biases, fc1/fc2.
EVERY_VARIANT = ("qwen3_moe", "qwen3_5_moe", "gpt_oss", "nemotron_h")

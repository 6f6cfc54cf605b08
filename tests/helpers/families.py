"""Every mlx-lm family built on SwitchGLU or SwitchMLP, as a tiny random checkpoint.

    FAMILIES[name]                  how a small model of the family is configured
    write_checkpoint(name, path)    the checkpoint on disk, in mlx-lm's own layout

``tests/streaming/test_families.py`` fails while mlx-lm has a family that is not listed here. For
a new one add an entry to ``FAMILIES`` with what its config.json needs beyond ``COMMON``; the test
then runs it in every mode. A new family's own name for K goes into ``TOP_K_KEYS`` of
``moelab/streaming/build.py``, a new name of its router's weight into ``ROUTERS``. A family that
cannot stream goes into ``NOT_STREAMED``, a family that no CPU can run goes into ``EXPERTS_ONLY``.

Every config has D = 64, E = 8, K = 2, unless its family allows only other sizes.
"""

import ast
import contextlib
import copy
import importlib
import io
import json
import zlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tuner.utils import linear_to_lora_layers

from moelab.experts import expert_modules
from moelab.streaming.build import TOP_K_KEYS

D, F, E, K, VOCAB = 64, 64, 8, 2, 96
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
KINDS = ["sliding_attention", "full_attention"]
# Keys of all families' configs; some name the same thing. mlx-lm drops keys unknown to a family.
COMMON = {
    "vocab_size": VOCAB, "num_vocab": VOCAB, "vocab_size_per_layer_input": VOCAB,
    "ngram_vocab_size_ratio": 2, "hidden_size": D, "model_dim": D, "num_hidden_layers": 2,
    "num_layers": 2, "intermediate_size": 128, "intermediate_size_mlp": 96, "ffn_hidden_size": 96,
    "dense_intermediate_size": 96, "hidden_size_per_layer_input": 0, "max_position_embeddings": 512,
    "model_max_length": 512, "rms_norm_eps": 1e-5, "norm_eps": 1e-5, "post_norm_eps": 1e-5,
    "layernorm_epsilon": 1e-5, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    "logits_scaling": 1.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
    "final_logit_softcapping": 30.0, "output_multiplier": 1.0,
    # attention
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_heads": 4,
    "num_attention_groups": 2, "global_head_dim": 16, "num_kv_shared_layers": 0,
    "attention_bias": False, "attention_multiplier": 0.25, "attention_chunk_size": 64,
    "layer_types": KINDS, "sliding_window": 8, "sliding_window_size": 8, "rope_scaling": None,
    "rope_theta": 10000.0, "layer_rope_theta": [10000.0, 10000.0], "use_cla": False,
    "cla_share_factor": 2, "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_v_head_dim": 16,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    # multi-head latent attention, alone and with an index
    "attention_method": "MLA", "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "mla_use_output_gate": True, "attn_res_block_size": 2, "o_groups": 2, "o_lora_rank": 32,
    "compress_ratios": [0, 0], "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    # experts
    "num_experts": E, "n_routed_experts": E, "num_local_experts": E, "moe_num_experts": E,
    "num_experts_per_tok": K, "moe_intermediate_size": F, "expert_ffn_hidden_size": F,
    "moe_hidden_size": F, "n_shared_experts": 1, "num_shared_experts": 1, "num_shared_expert": 1,
    "moe_num_shared_experts": 1, "shared_expert_intermediate_size": F, "share_expert_dim": F,
    "moe_shared_expert_intermediate_size": F, "shared_intermediate_size": F,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 0,
    "moe_layer_freq": 1, "is_moe_layer": [True, True], "interleave_moe_layer_step": 2,
    "expert_layer_offset": 0, "expert_layer_period": 1, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "enable_moe_block": True, "use_mixed_mlp_moe": True,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "use_expert_bias": True, "zero_expert_num": 2,
    "zero_expert_type": "identity", "routed_expert_hidden_size": 32, "latent_moe_use_norm": True,
    "activation_situ_beta": 1.0,
    # recurrent states
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "layer_group_size": 2, "group_norm_size": 2, "attn_layer_offset": 1, "attn_layer_period": 2,
    "hybrid_layer_pattern": [1, 0], "hybrid_override_pattern": ["M", "E", "*", "E"],
    "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2,
                           "head_dim": 32, "short_conv_kernel_size": 4},
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_d_conv": 4,
    "mamba_n_groups": 1, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 32, "conv_kernel": 4,
    "n_groups": 2, "mlp_bias": False, "use_conv_bias": True, "conv_bias": True, "conv_L_cache": 3,
}  # fmt: skip
# A family with one of these names for K does not get the usual name of K from ``COMMON``.
OWN_TOP_K_KEYS = {*TOP_K_KEYS} - {"num_experts_per_tok", "experts_per_token"}

# Keys of each family's config.json, or of its ``text_config``, besides ``COMMON``.
GEMMA4 = {"top_k_experts": K, "tie_word_embeddings": True}
MISTRAL4 = {"rope_parameters": {**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}}
SMALL = {"intermediate_size": F}  # some families give the experts' size this name
FAMILIES = {
    **{name: {} for name in (
        "Klear", "afmoe", "bailing_moe", "deepseek", "deepseek_v3", "deepseek_v32", "exaone_moe",
        "glm4_moe_lite", "jamba", "laguna", "qwen2_moe", "qwen3_moe",
    )},
    **{name: {"text_config": {}} for name in (
        "kimi_k25", "kimi_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe",
    )},
    **dict.fromkeys(["gpt_oss", "granitemoe", "mixtral", "olmoe"], SMALL),
    "bailing_hybrid": {"num_hidden_layers": 3}, "bailing_moe_linear": {"num_hidden_layers": 3},
    "longcat_flash": {"moe_topk": K}, "longcat_flash_ngram": {"moe_topk": K},
    "bailing_moe_v3": {
        "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid",
        "num_hidden_layers": 3,
    },
    "deepseek_v2": {"topk_method": "greedy", "rope_scaling": YARN},
    "deepseek_v41": {"head_dim": 32},
    "dots1": {"scoring_func": "noaux_tc"},
    "ernie4_5_moe": {"use_bias": True, "moe_k": K},
    "gemma4": {"vocab_size": VOCAB, "text_config": {**GEMMA4, "model_type": "gemma4_text"}},
    "gemma4_text": GEMMA4,
    "glm4_moe": {"use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm_moe_dsa": {"scoring_func": "sigmoid", "rope_parameters": ROPE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan": {
        "moe_topk": K, "use_qk_norm": True,
        "rope_scaling": {"factor": 1.0, "type": "dynamic", "alpha": 1000.0},
    },
    "kimi_k3": {"text_config": {"model_type": "kimi_linear", "num_experts_per_token": K}},
    "kimi_linear": {"num_experts_per_token": K},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"text_config": {
        **SMALL, "num_hidden_layers": 4, "num_experts_per_tok": 1, "use_qk_norm": True,
    }},
    "mellum": {"rope_parameters": dict.fromkeys(KINDS, ROPE)},
    "mimo_v2_flash": {
        "moe_layer_freq": [0, 1], "scoring_func": "sigmoid", "partial_rotary_factor": 0.5,
    },
    "minimax": {**SMALL, "shared_intermediate_size": 0, "rotary_dim": 8},
    "minimax_m3_vl": {"text_config": {
        **SMALL, "moe_layer_freq": [0, 1],
        **dict.fromkeys(["layer_types", "index_head_dim", "index_n_heads"]),
    }},
    "mistral3": {"text_config": {**MISTRAL4, "model_type": "mistral4"}},
    "mistral4": MISTRAL4,
    "muse_spark": {"text_config": {
        "rope_parameters": {"rope_theta": 10000.0}, "num_shared_experts": 0,
    }},
    "nemotron_h": {"layer_types": None, "use_bias": False},
    "phimoe": {
        **SMALL, "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
                                  "short_mscale": 1.0, "long_mscale": 1.0, "type": "longrope"},
    },
    "phixtral": {"rotary_dim": 8},
    "prism_hadamard_qwen35": {
        "schema_version": 1, "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.1.self_attn.o_proj", "embedding": False,
                     "dtype": "float16", "block": 0}],
        "text_config": {"hidden_size": 128, "head_dim": 32},
    },
    "qwen3_next": {"partial_rotary_factor": 0.5},
    "solar_open": {"partial_rotary_factor": 1.0},
    "step3p5": {"moe_top_k": K},
}  # fmt: skip

# Families that moelab refuses: their experts are no SwitchGLU or SwitchMLP.
NOT_STREAMED = {"dbrx"}
# Other names of families, whose checkpoints mlx-lm loads with the family's code.
ALIASES = {a: name for a, name in mlx_lm_utils.MODEL_REMAPPING.items() if name in FAMILIES}
# Families that mlx-lm cannot run on a CPU. Their experts are tested without the rest of the model.
EXPERTS_ONLY = {"muse_spark"}

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
COMMON_VARIANTS = ("affine4", "affine8", "mxfp4", "mixed", "sharded", "plain")
# Four kinds of experts: gate/up/down, the same in a hybrid, with additive biases, and fc1/fc2.
EVERY_VARIANT = ("qwen3_moe", "qwen3_5_moe", "gpt_oss", "nemotron_h")
# Endings of the names of the families' router weights.
ROUTERS = ("gate.weight", "router.weight", "router.proj.weight", "router.layer.weight")
ROUTERS += ("classifier.weight", "gate.wg.weight")
MODEL_FILES = {p.stem: p.read_text() for p in Path(mlx_lm.models.__path__[0]).glob("*.py")}


def variant_of(name: str) -> str:
    """Choose a variant by a family's name alone: a new family changes no other family's variant."""
    return COMMON_VARIANTS[zlib.crc32(name.encode()) % len(COMMON_VARIANTS)]


def discover() -> set[str]:
    """mlx-lm's models that import SwitchGLU or SwitchMLP, or anything from a file that does."""
    imports, uses = {}, set()
    for name, text in MODEL_FILES.items():
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
        named = {n.module: {a.name for a in n.names} for n in nodes if n.level == 1}
        imports[name] = {*named} | named.get(None, set())
        if named.get("switch_layers", set()) & {"SwitchGLU", "SwitchMLP"}:
            uses.add(name)
    while grown := {name for name, seen in imports.items() if seen & uses} - uses:
        uses |= grown
    modules = {name: dir(importlib.import_module(f"mlx_lm.models.{name}")) for name in uses}
    return {name for name, names in modules.items() if {"Model", "ModelArgs"} <= {*names}}


def config_of(name: str, own: dict) -> dict:
    """The config.json of a tiny model; ``own`` has its keys, or its ``text_config``'s."""
    text = own.get("text_config", own)
    inner = {**COMMON, "model_type": name, **text}
    if text.keys() & OWN_TOP_K_KEYS:
        del inner["num_experts_per_tok"]
    outer = {"model_type": name, **own, "text_config": inner}
    return copy.deepcopy(inner if text is own else outer)


def build(name: str, **changes) -> tuple[nn.Module, dict]:
    """A family's random float32 model (no parameter is all zeros or ones), and its config."""
    mx.random.seed(zlib.crc32(name.encode()))
    config = config_of(name, FAMILIES[ALIASES.get(name, name)])
    config.get("text_config", config).update(changes)
    model_class, args_class = mlx_lm_utils._get_classes(copy.deepcopy(config))
    model = model_class(args_class.from_dict(copy.deepcopy(config)))

    def disturb(path, p):
        if not mx.issubdtype(p.dtype, mx.floating):
            return p
        if path.endswith(("correction_bias", "expert_bias")):
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


def write_checkpoint(name: str, path: Path, variant: str = "affine4", **changes) -> Path:
    """Write a random checkpoint of a family, as ``mlx_lm.convert`` would, and return its folder."""
    spec = VARIANTS[variant]
    model, config = build(name, **changes)
    # mlx-lm and real checkpoints keep some tensors in float32 (a model's cast_predicate).
    keep = getattr(model, "cast_predicate", lambda _: True)
    dtype = spec.get("dtype", mx.bfloat16)

    def cast(p, a):
        return a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) and keep(p) else a

    model.update(tree_map_with_path(cast, model.parameters()))
    if "bits" in spec:
        own = getattr(model, "quant_predicate", None)
        experts = [path for path, _ in expert_modules(model)]

        def predicate(path, module):
            if spec.get("mixed") and path.startswith(tuple(f"{e}." for e in experts)):
                if path.startswith(experts[-1]) and path.endswith(("down_proj", "fc2")):
                    return {"bits": 8, "group_size": 64, "mode": "affine"}
                return not path.endswith("gate_proj")  # one projection is not quantized
            return own(path, module) if own is not None else True

        # prism's config describes its packed layers here. These layers are not changed.
        packed = config.pop("quantization", None)
        sizes = {k: spec[k] for k in ("group_size", "bits", "mode")}
        sizes["global_scale"] = spec.get("global_scale", False)
        with contextlib.redirect_stdout(io.StringIO()):
            model, config = mlx_lm_utils.quantize_model(
                model, config, **sizes, quant_predicate=predicate
            )
        if packed is not None:
            config["quantization"] = packed
    weights = dict(tree_flatten(model.parameters()))
    write_files(path, weights, config, shards=spec.get("shards", 1))
    return path


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def per_expert(prefix: str, names: dict[str, str]):
    """The layout with a tensor for each expert; ``names`` has the layout's names of projections."""

    def convert(parent, tensors):
        return {
            f"{parent}.{prefix}.{e}.{names[p]}.{kind}": a[e]
            for (p, kind), a in tensors.items()
            for e in range(a.shape[0])
        }

    return convert


def gate_up(name: str, down_name: str, transposed: bool = False):
    """The layouts with gate and up in one tensor: ``[E, 2F, D]``, ``transposed`` ``[E, D, 2F]``."""

    def convert(parent, tensors):
        gate, up, down = (tensors[p, "weight"] for p in GATE_UP_DOWN)
        both = mx.concatenate([gate, up], axis=1)
        if transposed:
            both, down = (mx.contiguous(a.swapaxes(1, 2)) for a in (both, down))
        return {f"{parent}.{name}": both, f"{parent}.{down_name}": down}

    return convert


def alternating(parent, tensors):
    """gpt-oss: rows of gate and up alternate; blocks of mxfp4 hold 32 numbers in 16 bytes."""
    out = {}
    for kind, end in {"weight": "blocks", "scales": "scales", "bias": "bias"}.items():
        gate, up, down = (tensors[p, kind] for p in GATE_UP_DOWN)
        both = mx.stack([gate, up], axis=2).reshape(E, -1, *gate.shape[2:])
        if kind == "weight":
            both, down = (a.view(mx.uint8).reshape(*a.shape[:2], -1, 16) for a in (both, down))
        out[f"{parent}.experts.gate_up_proj_{end}"] = mx.contiguous(both)
        out[f"{parent}.experts.down_proj_{end}"] = mx.contiguous(down)
    return out


# Families whose authors publish another layout, which mlx-lm's ``sanitize`` rearranges: the
# checkpoint's variant, and a function that brings one module's experts into the authors' layout.
IN_ONE = ("experts.gate_up_proj", "experts.down_proj")
HUGGING_FACE = {
    "mixtral": ("affine4", per_expert("experts", dict(zip(GATE_UP_DOWN, ("w1", "w3", "w2"))))),
    "qwen3_moe": ("plain", per_expert("experts", dict(zip(GATE_UP_DOWN, GATE_UP_DOWN)))),
    "nemotron_h": ("plain", per_expert("experts", {"fc1": "up_proj", "fc2": "down_proj"})),
    "phixtral": ("plain", per_expert("mlp", {"fc1": "fc1", "fc2": "fc2"})),
    "qwen3_5_moe": ("plain", gate_up(*IN_ONE)),
    "granitemoe": ("plain", gate_up("input_linear.weight", "output_linear.weight")),
    "gpt_oss": ("mxfp4", alternating),
    "llama4": ("plain", gate_up(*IN_ONE, transposed=True)),
    "qwen3_vl_moe": ("plain", gate_up(*IN_ONE, transposed=True)),
}
# Checkpoints of these families cannot be streamed: an expert's gate or up is not contiguous.
REARRANGED = {"gpt_oss", "llama4", "qwen3_vl_moe"}


def write_hugging_face(name: str, path: Path) -> Path:
    """Write the numbers that ``write_checkpoint`` writes, but in the authors' layout."""
    variant, convert = HUGGING_FACE[name]
    write_checkpoint(name, path, variant)
    config = json.loads((path / "config.json").read_text())
    weights = mx.load(str(path / "model.safetensors"))
    model, _ = mlx_lm_utils.load_model(path, lazy=True)
    for module, _ in expert_modules(model):
        names = [k for k in weights if k.startswith(f"{module}.")]
        tensors = {tuple(k.rsplit(".", 2)[1:]): weights.pop(k) for k in names}
        weights.update(convert(module.rpartition(".")[0], tensors))
    if name in ("qwen3_5_moe", "qwen3_vl_moe"):  # language_model and model change places
        old, new = "language_model.model.", "model.language_model."
        weights = {
            k.replace(old, new).replace("language_model.lm_head", "lm_head"): w
            for k, w in weights.items()
        }
        # These models also take images. mlx-lm leaves out the weights for images.
        weights["model.visual.blocks.0.norm1.weight"] = mx.ones(8)
        config["vision_config"] = {"depth": 1, "hidden_size": 8}
    if name == "gpt_oss":
        del config["quantization"]
        config["quantization_config"] = {"quant_method": "mxfp4"}
    write_files(path, weights, config)
    return path


def write_files(path: Path, weights: dict[str, mx.array], config: dict, shards: int = 1) -> None:
    """Write config.json, an index and ``shards`` files; the files get the weights in turn."""
    path.mkdir(parents=True, exist_ok=True)
    mlx_lm_utils.save_config(config, path / "config.json")
    names, weight_map = sorted(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        file = "model.safetensors" if shards == 1 else file
        inside = {n: weights[n] for n in names[i::shards]}
        mx.save_safetensors(str(path / file), inside, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(inside, file)
    total = {"total_size": sum(w.nbytes for w in weights.values())}
    index = {"metadata": total, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_adapters(folder: Path, source: Path, kind: str, *keys: str) -> Path:
    """Write adapters as mlx_lm.lora does, with numbers that change the text; return the folder."""
    model, _ = mlx_lm_utils.load_model(source)
    config = {"fine_tune_type": kind, "num_layers": 4}
    if kind == "full":
        kept = {k: p for k, p in tree_flatten(model.parameters()) if "switch_mlp" not in k}
        floating = (k for k, p in kept.items() if mx.issubdtype(p.dtype, mx.floating))
        weights = {k: kept[k] * 1.05 for k in floating if "layers" in k}
    else:
        config["lora_parameters"] = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": keys}
        linear_to_lora_layers(model, 4, config["lora_parameters"], use_dora=kind == "dora")
        ends, added = ("lora_a", "lora_b", ".m"), tree_flatten(model.parameters())
        weights = {k: p + 0.02 for k, p in added if k.endswith(ends)}
    assert weights
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def load_resident(path: Path) -> nn.Module:
    """Plain mlx-lm, every expert in memory, float32: the reference for the streamed modes."""
    model, _ = mlx_lm_utils.load_model(path)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model

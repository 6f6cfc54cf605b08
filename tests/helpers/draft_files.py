"""DFlash drafts in z-lab's layout."""

import json

import mlx.core as mx
import numpy as np

D, V, L, b = 32, 64, 6, 5
CONFIG = {  # the keys of z-lab's config.json, in little
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": b,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 2, 3]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": D,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_target_layers": L,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": V,
}


def write_draft(folder, seed=0, **changes):
    """A random draft in z-lab's layout, bfloat16; its weights as float64."""
    config = {**CONFIG, **changes}
    rng = np.random.default_rng(seed)
    H, K, d, F = (
        config[k]
        for k in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    )
    n, hidden = len(config["dflash_config"]["target_layer_ids"]), config["hidden_size"]
    shapes = {
        "fc.weight": (hidden, n * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        p = f"layers.{i}."
        shapes |= {
            f"{p}input_layernorm.weight": (hidden,),
            f"{p}post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"{p}self_attn.{x}_norm.weight": (d,) for x in "qk"}
        shapes |= {
            f"{p}self_attn.q_proj.weight": (H * d, hidden),
            f"{p}self_attn.o_proj.weight": (hidden, H * d),
        }
        shapes |= {f"{p}self_attn.{x}_proj.weight": (K * d, hidden) for x in "kv"}
        shapes |= {f"{p}mlp.{x}_proj.weight": (F, hidden) for x in ("gate", "up")}
        shapes |= {f"{p}mlp.down_proj.weight": (hidden, F)}
    weights = {}
    for name, shape in shapes.items():
        w = (
            1 + 0.2 * rng.normal(size=shape)
            if len(shape) == 1
            else rng.normal(size=shape) * shape[1] ** -0.5
        )
        weights[name] = mx.array(w).astype(mx.bfloat16)
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return {k: np.array(w.astype(mx.float32), np.float64) for k, w in weights.items()}

"""DFlash drafts in z-lab's layout, and a model that they draft for."""

import json

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from moelab.speculation.dflash import DFlashArgs, DFlashModel

D, V, L, b = 32, 64, 6, 5
CONFIG = {  # the keys of z-lab's config.json, with small sizes
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_bias": False, "attention_dropout": 0.0, "block_size": b, "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 2, 3]}, "dtype": "bfloat16",
    "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": D,
    "initializer_range": 0.02, "intermediate_size": 48,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 4096, "max_window_layers": 3, "model_type": "qwen3",
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
    "num_target_layers": L, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000,
    "sliding_window": 8, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": True, "vocab_size": V,
}  # fmt: skip


def write_draft(folder, seed=0, **changes):
    """Write a random bfloat16 draft in z-lab's layout; return its weights as float64."""
    config, rng, weights = {**CONFIG, **changes}, np.random.default_rng(seed), {}
    model = DFlashModel(DFlashArgs.from_dict({**config, "block_size": b}))  # its names are z-lab's
    for name, p in tree_flatten(model.parameters()):
        w = rng.normal(size=p.shape)
        w = 1 + 0.2 * w if p.ndim == 1 else w * p.shape[1] ** -0.5
        weights[name] = mx.array(w).astype(mx.bfloat16)
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return {k: np.array(w.astype(mx.float32), np.float64) for k, w in weights.items()}


def target(layers=L, hidden=D, vocab=V):
    """The model that a draft guesses for: small, without experts, random."""
    mx.random.seed(3)
    args = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=hidden, num_hidden_layers=layers, intermediate_size=48,
        vocab_size=vocab, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = qwen3.Model(args)
    mx.eval(model.parameters())
    return model

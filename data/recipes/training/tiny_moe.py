"""tiny-moe: a Qwen3.5-MoE hybrid small enough to ship, in mlx-lm's own format.

The README of ``data/models/tiny-moe`` has the commands. Training needs a CUDA GPU, PyTorch and
fla-core, and neither MLX nor moelab.
"""

import corpus

# B batch, T tokens, D hidden, F expert hidden, E experts, K experts per token, L layers.
TEXT_CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": corpus.VOCAB_SIZE,
    "hidden_size": 256,  # D
    "num_hidden_layers": 8,  # L: (GatedDeltaNet x 3, full attention) x 2
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 64,  # E
    "num_experts_per_tok": 8,  # K
    "moe_intermediate_size": 128,  # F
    "shared_expert_intermediate_size": 256,
    "intermediate_size": 256,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    },
    "pad_token_id": 0,
    "eos_token_id": 1,
}
GROUP_SIZE, BITS = 64, 4
CONFIG = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
# Small modules with much influence get eight bits. mlx-lm does the same for the first two.
EIGHT_BIT = ("mlp.gate", "shared_expert_gate", "embed_tokens", "in_proj_a", "in_proj_b")
NOT_QUANTIZED = ("norm", "norm_embedding", "norm_hidden", "conv1d", "A_log", "dt_bias")


def bits_of(path):
    """Return the bits per weight of the module at ``path``; None if it is not quantized."""
    if path.endswith(NOT_QUANTIZED):
        return None
    return 8 if path.endswith(EIGHT_BIT) else BITS

"""Configurations of real families, small enough for a test."""

import json

from moelab import synthesize as S


def small(like="qwen3.5-35b-a3b"):
    """The same family, small enough for a test."""
    config = json.loads(json.dumps(S.CONFIGS[like]))
    config.get("text_config", config).update(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=64,
        num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip
    if "rope_parameters" in config.get("text_config", {}):
        config["text_config"]["rope_parameters"]["mrope_section"] = [3, 3, 2]
    return config

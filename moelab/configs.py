"""Published configurations of models, with the keys that mlx-lm's classes need.

From them ``synthesize`` writes checkpoints of real shapes and ``python -m moelab plan`` knows a
model's sizes before it is downloaded. The totals of parameters are within 1% of the published ones.
Values that change no size and were not found are mlx-lm's defaults.
"""

_SWA = "sliding_attention"
_FULL = "full_attention"


def _gpt_oss(layers, experts):
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": layers,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": experts, "num_experts_per_tok": 4,
        "layer_types": [_SWA, _FULL] * (layers // 2), "sliding_window": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0,
        },
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "vocab_size": 201088,
    }  # fmt: skip


def _mla(**sizes):  # DeepSeek V3, Kimi K2 and GLM-5 have this in common
    return {
        "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "attention_bias": False, "tie_word_embeddings": False,
        **sizes,
    }  # fmt: skip


def _qwen3(**sizes):
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "vocab_size": 151936,
        **sizes,
    }  # fmt: skip


def _qwen3_5(**sizes):
    text = {
        "model_type": "qwen3_5_moe_text",
        "full_attention_interval": 4,  # three GatedDeltaNet layers, then one of full attention
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attention_bias": False,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
        "rope_parameters": {
            "rope_type": "default",
            "type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
        **sizes,
    }
    return {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": False,
    }


_KIMI_K3_FULL = [*range(4, 93, 4), 93]  # counted from 1, as in the published lists
_GLM_5_3_FULL = [*range(4, 46, 4)]  # published counted from 0: 3, 7, ..., 43

CONFIGS = {
    "qwen3.5-35b-a3b": _qwen3_5(
        hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, linear_num_value_heads=32,
        num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512,
    ),
    "qwen3.5-122b-a10b": _qwen3_5(
        hidden_size=3072, num_hidden_layers=48, num_attention_heads=32, linear_num_value_heads=64,
        num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
    ),
    "qwen3.5-397b-a17b": _qwen3_5(
        hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, linear_num_value_heads=64,
        num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
    ),
    "qwen3-30b-a3b": _qwen3(
        hidden_size=2048, num_hidden_layers=48, intermediate_size=6144, num_attention_heads=32,
        moe_intermediate_size=768,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_qk_norm": False,
        "attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "vocab_size": 151552,
    },
    "glm-5": _mla(
        model_type="glm_moe_dsa", architectures=["GlmMoeDsaForCausalLM"],
        hidden_size=6144, intermediate_size=12288, num_hidden_layers=78,
        num_attention_heads=64, num_key_value_heads=64, q_lora_rank=2048,
        qk_nope_head_dim=192, v_head_dim=256,
        index_n_heads=32, index_head_dim=128, index_topk=2048, indexer_rope_interleave=True,
        n_routed_experts=256, first_k_dense_replace=3, n_group=1, topk_group=1,
        routed_scaling_factor=2.5, rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
        max_position_embeddings=202752, vocab_size=154880,
    ),
    "deepseek-v3": _mla(
        model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"],
        hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536,
        qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=256, first_k_dense_replace=3, n_group=8, topk_group=4,
        routed_scaling_factor=2.5, rms_norm_eps=1e-6, rope_theta=10000,
        rope_scaling={
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        max_position_embeddings=163840, vocab_size=129280,
    ),
    "kimi-k2": _mla(
        model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"],
        hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=64, num_key_value_heads=64, q_lora_rank=1536,
        qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=384, first_k_dense_replace=1, n_group=1, topk_group=1,
        routed_scaling_factor=2.827, rms_norm_eps=1e-5, rope_theta=50000.0, rope_scaling=None,
        max_position_embeddings=262144, vocab_size=163840,
    ),
    # This is for sizes only. mlx-lm has no deepseek_v4 (its pull request 1201); deepseek_v41 has
    # the same matrices but for the compressors: 0.04 B more. V4's first three layers route by a
    # table.
    "deepseek-v4-flash": {
        "model_type": "deepseek_v41",
        "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
        "q_lora_rank": 1024, "qk_rope_head_dim": 64, "o_groups": 8, "o_lora_rank": 1024,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
        "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0, "sliding_window": 128,
        "compress_ratios": [0, 0, *([4, 128] * 20), 4],
        "kv_source_layer_ids": [*range(2, 43)], "index_source_layer_ids": [*range(2, 43)],
        "compress_rope_theta": 160000.0, "candidate_source_layer_id": -1,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 1048576, "vocab_size": 129280,
    },
    # This leaves out engram, which mlx-lm refuses, the vision part and the three draft layers.
    "deepseek-v4.1-flash": {
        "model_type": "deepseek_v41",
        "architectures": ["DeepseekV41ForCausalLM"],
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64, "head_dim": 512,
        "q_lora_rank": 1280, "qk_rope_head_dim": 64, "o_groups": 8, "o_lora_rank": 1024,
        "n_routed_experts": 384, "num_experts_per_tok": 6, "moe_intermediate_size": 2304,
        "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0, "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "compress_rope_theta": 160000.0, "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "rms_norm_eps": 1e-20, "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536,
            "beta_fast": 32, "beta_slow": 1,
        },
        "max_position_embeddings": 1048576, "vocab_size": 129280,
    },
    "minimax-m3": {
        "model_type": "minimax_m3_vl",
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": {
            "hidden_size": 6144, "intermediate_size": 3072, "dense_intermediate_size": 12288,
            "shared_intermediate_size": 3072, "num_hidden_layers": 60,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "num_local_experts": 128, "num_experts_per_tok": 4,
            "moe_layer_freq": [0] * 3 + [1] * 57, "routed_scaling_factor": 2.0,
            "use_qk_norm": True, "use_gemma_norm": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
            "rotary_dim": 64, "partial_rotary_factor": 0.5, "rope_theta": 5000000,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 1048576,
            "sparse_attention_config": {
                "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16,
                "sparse_block_size": 128, "sparse_local_block": 1,
                "sparse_attention_freq": [0] * 3 + [1] * 57,
            },
            "tie_word_embeddings": False, "vocab_size": 200064,
        },
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "num_global_key_value_heads": 2, "global_head_dim": 512, "attention_k_eq_v": True,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704, "use_double_wide_mlp": False,
            "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
            "layer_types": ([_SWA] * 5 + [_FULL]) * 5, "sliding_window": 1024,
            "sliding_window_pattern": 6, "final_logit_softcapping": 30.0,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
        "vocab_size": 262144,
    },
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4,
        "n_groups": 8, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False, "use_bias": False,
        "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
        "time_step_min": 0.001, "time_step_max": 0.1,
        "max_position_embeddings": 262144, "tie_word_embeddings": False, "vocab_size": 131072,
    },
    "nemotron-3-super-120b-a12b": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": 4096, "intermediate_size": 2688, "num_hidden_layers": 88,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4,
        "n_groups": 8, "n_routed_experts": 512, "num_experts_per_tok": 22, "n_shared_experts": 1,
        "moe_latent_size": 1024,
        "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 5.0,
        "attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False, "use_bias": False,
        "use_conv_bias": True, "layer_norm_epsilon": 1e-5,
        "time_step_min": 0.001, "time_step_max": 0.1,
        "max_position_embeddings": 262144, "tie_word_embeddings": False, "vocab_size": 131072,
    },
    # This is for sizes only. mlx-lm has no qwen4_exp; Qwen3.5's class has its layers, but for
    # hyper-connections, indexers, the n-gram table (51 B) and what reads it (0.7 B).
    "qwen3.8-flash-next": _qwen3_5(
        hidden_size=2560, num_hidden_layers=48, num_attention_heads=24, linear_num_value_heads=48,
        num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=640, shared_expert_intermediate_size=640,
    ),
    "laguna-s-2.1": {
        "model_type": "laguna",
        "architectures": ["LagunaForCausalLM"],
        "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 48,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "num_attention_heads_per_layer": [48, 72, 72, 72] * 12,
        "layer_types": [_FULL, _SWA, _SWA, _SWA] * 12, "sliding_window": 512,
        "mlp_layer_types": ["dense"] + ["sparse"] * 47, "gating": "per-head",
        "num_experts": 256, "num_experts_per_tok": 10, "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024, "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.0, "attention_bias": False, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            _FULL: {
                "rope_type": "yarn", "rope_theta": 500000.0, "factor": 128.0,
                "original_max_position_embeddings": 8192, "beta_slow": 1.0, "beta_fast": 32.0,
                "attention_factor": 1.4852030263919618, "partial_rotary_factor": 0.5,
            },
            _SWA: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "max_position_embeddings": 1048576, "tie_word_embeddings": False, "vocab_size": 100352,
    },
    # This leaves out the vision part.
    "kimi-k3": {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": {
            "model_type": "kimi_linear",
            "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 93,
            "num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
            "linear_attn_config": {
                "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4,
                "use_full_rank_gate": True, "gate_lower_bound": -5.0,
                "full_attn_layers": _KIMI_K3_FULL,
                "kda_layers": [i for i in range(1, 94) if i not in _KIMI_K3_FULL],
            },
            "attn_res_block_size": 12, "hidden_act": "situ", "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
            "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584,
            "latent_moe_use_norm": True, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
            "routed_scaling_factor": 1.0, "use_grouped_topk": True, "num_expert_group": 1,
            "topk_group": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576,
            "tie_word_embeddings": False, "vocab_size": 163840,
        },
    },
    # This is for sizes only. mlx-lm has no glm5_next; Kimi K3's class has its layers, with another
    # activation and without indexers and hyper-connections (0.12 B).
    "glm-5.3-flash": {
        "model_type": "kimi_k3",
        "text_config": {
            "model_type": "kimi_linear",
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 45,
            "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0,
            "v_head_dim": 256, "mla_use_nope": True, "mla_use_output_gate": False,
            "linear_attn_config": {
                "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0, "full_attn_layers": _GLM_5_3_FULL,
                "kda_layers": [i for i in range(1, 46) if i not in _GLM_5_3_FULL],
            },
            "num_experts": 288, "num_experts_per_token": 8, "num_shared_experts": 1,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1,
            "moe_renormalize": True, "routed_scaling_factor": 2.5, "num_expert_group": 1,
            "topk_group": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576,
            "tie_word_embeddings": False, "vocab_size": 154880,
        },
    },
    "qwen3-235b-a22b": _qwen3(
        hidden_size=4096, num_hidden_layers=94, intermediate_size=12288, num_attention_heads=64,
        moe_intermediate_size=1536,
    ),
    # Vocabulary and untied head are transformers' defaults for this family.
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 1024,
        "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "attention_bias": False, "tie_word_embeddings": False, "vocab_size": 50304,
    },
}  # fmt: skip

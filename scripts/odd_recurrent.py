"""Lists odd configurations of models with recurrent layers."""

from __future__ import annotations

from typing import Any

from odd_parts import (
    ALL_FULL,
    DELTA,
    EACH_KV,
    FIRST_FULL,
    FIVE_HEADS,
    HALF,
    KIMI,
    LINEAR,
    LLAMA3,
    MAMBA2,
    MULTIPLIED,
    NEMOTRON,
    ONE_KV,
    QUARTER,
    QUARTER_OF_EIGHT,
    THREE_HEADS,
    TIED,
    UNTIED,
    rope,
)

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next_hybrid": ("qwen3_next", DELTA | ONE_KV | UNTIED | {"norm_topk_prob": True} | QUARTER),
    "qwen3_next_first_full": (
        "qwen3_next",
        DELTA | TIED | {"layer_types": FIRST_FULL, "norm_topk_prob": False, "linear_value_head_dim": 16} | HALF,
    ),
    "qwen35_hybrid": ("qwen3_5_text", DELTA | ONE_KV | UNTIED | HALF),
    "qwen35_first_full": (
        "qwen3_5_text",
        DELTA | TIED | {"layer_types": FIRST_FULL, "linear_num_key_heads": 3, "linear_num_value_heads": 3} | QUARTER,
    ),
    "qwen35_moe_hybrid": ("qwen3_5_moe_text", DELTA | UNTIED | QUARTER),
    "qwen35_moe_first_full": (
        "qwen3_5_moe_text",
        DELTA | ONE_KV | TIED | {"layer_types": FIRST_FULL, "linear_conv_kernel_dim": 5} | HALF,
    ),
    "bamba_groups": ("bamba", MAMBA2 | ONE_KV | UNTIED | {"num_attention_heads": 5, "attn_layer_indices": [1]} | HALF),
    "bamba_first_full": (
        "bamba",
        MAMBA2 | TIED | {"attn_layer_indices": [0, 2], "mamba_n_groups": 1} | QUARTER_OF_EIGHT,
    ),
    "bamba_each_group": (
        "bamba",
        MAMBA2
        | EACH_KV
        | UNTIED
        | {"mamba_n_heads": 5, "mamba_d_head": 16, "mamba_n_groups": 5, "mamba_d_state": 22, "mamba_d_conv": 2}
        | {"attn_layer_indices": [2], "mamba_conv_bias": False, "attention_bias": True}
        | rope(partial_rotary_factor=1.0),
    ),
    "bamba_biases": (
        "bamba",
        MAMBA2
        | QUARTER_OF_EIGHT
        | TIED
        | {"attn_layer_indices": [0, 2], "mamba_proj_bias": True, "mlp_bias": True, "attention_bias": True},
    ),
    "granitemoehybrid_experts": (
        "granitemoehybrid",
        MAMBA2
        | MULTIPLIED
        | ONE_KV
        | UNTIED
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "shared_intermediate_size": 28},
    ),
    "granitemoehybrid_rope": (
        "granitemoehybrid",
        MAMBA2
        | MULTIPLIED
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "num_experts_per_tok": 1, "shared_intermediate_size": 12}
        | {"layer_types": ["full_attention", "linear_attention", "full_attention"], "position_embedding_type": "rope"}
        | {"attention_bias": True, "mamba_n_groups": 5, "mamba_conv_bias": False}
        | TIED
        | rope(300.0),
    ),
    "granitemoehybrid_dense_rope": (
        "granitemoehybrid",
        MAMBA2
        | MULTIPLIED
        | ONE_KV
        | {"num_attention_heads": 5, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 44}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "mamba_n_groups": 1}
        | {"position_embedding_type": "rope", "mamba_d_conv": 5}
        | TIED
        | rope(1000.0),
    ),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        MAMBA2
        | MULTIPLIED
        | EACH_KV
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 36, "mamba_d_head": 16}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "mamba_n_heads": 5}
        | {"mamba_n_groups": 5, "mamba_d_state": 6}
        | UNTIED,
    ),
    "granitemoehybrid_no_mamba": (
        "granitemoehybrid",
        MAMBA2
        | MULTIPLIED
        | ONE_KV
        | {"layer_types": ALL_FULL, "position_embedding_type": "rope", "shared_intermediate_size": 28}
        | UNTIED
        | rope(700.0),
    ),
    "falcon_h1_normed": (
        "falcon_h1",
        MAMBA2
        | THREE_HEADS
        | UNTIED
        | {"mamba_d_ssm": 72, "mamba_n_heads": 9, "mamba_n_groups": 3, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False, "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.6], "mlp_multipliers": [0.7, 1.4]}
        | {"attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2, "ssm_in_multiplier": 1.3}
        | {"ssm_out_multiplier": 0.7, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.6}
        | rope(500.0),
    ),
    "falcon_h1_no_biases": (
        "falcon_h1",
        MAMBA2
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 6, "mamba_d_ssm": 48, "mamba_d_head": 16}
        | {"mamba_n_heads": 3, "mamba_n_groups": 1, "mamba_d_state": 26, "mamba_d_conv": 2, "mamba_conv_bias": False}
        | TIED
        | LINEAR,
    ),
    "falcon_h1_five_heads": (
        "falcon_h1",
        MAMBA2 | FIVE_HEADS | TIED | {"mamba_d_ssm": 80, "key_multiplier": 0.7} | rope(),
    ),
    "nemotron_h_odd": (
        "nemotron_h",
        NEMOTRON
        | ONE_KV
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "num_hidden_layers": 5,
            "head_dim": 24,
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        },
    ),
    "nemotron_h_dense": (
        "nemotron_h",
        NEMOTRON
        | FIVE_HEADS
        | {
            "layers_block_type": ["full_attention", "mlp", "linear_attention", "mlp"],
            "num_hidden_layers": 4,
            "n_groups": 5,
            "mlp_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 2,
        },
    ),
    "nemotron_h_latent": (
        "nemotron_h",
        NEMOTRON
        | THREE_HEADS
        | {
            "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 3,
            "mamba_head_dim": 24,
            "n_groups": 1,
            "moe_latent_size": 12,
            "n_routed_experts": 9,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": False,
        },
    ),
    "kimi_linear_groups": (
        "kimi_linear",
        KIMI
        | UNTIED
        | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 3}
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "linear_head_dim": 10, "first_k_dense_replace": 2},
    ),
    "kimi_linear_first_full": (
        "kimi_linear",
        KIMI
        | UNTIED
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "q_lora_rank": 28}
        | {"linear_num_heads": 5, "linear_head_dim": 16, "linear_conv_kernel_dim": 2, "n_group": 1, "topk_group": 1}
        | {"n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 0, "num_key_value_heads": 4},
    ),
    "lfm2_biases": (
        "lfm2",
        ONE_KV
        | UNTIED
        | {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "conv_L_cache": 5}
        | {"num_attention_heads": 5, "block_auto_adjust_ff_dim": False}
        | rope(),
    ),
    "lfm2_rounded_width": (
        "lfm2",
        TIED
        | {"full_attn_idxs": [0], "conv_L_cache": 2, "block_multiple_of": 9, "block_ffn_dim_multiplier": 1.3}
        | LLAMA3,
    ),
    "lfm2_moe_scaled": (
        "lfm2_moe",
        UNTIED
        | {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "num_dense_layers": 0}
        | {"norm_topk_prob": False, "routed_scaling_factor": 1.7, "moe_intermediate_size": 12}
        | rope(),
    ),
    "lfm2_moe_unbiased": (
        "lfm2_moe",
        TIED
        | {"layer_types": ["full_attention", "conv", "conv"], "use_expert_bias": False, "num_dense_layers": 2}
        | {"moe_intermediate_size": 12}
        | rope(),
    ),
    "jamba_biases": (
        "jamba",
        ONE_KV
        | TIED
        | {"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1, "num_attention_heads": 5}
        | {"expert_layer_period": 3, "expert_layer_offset": 0, "mamba_expand": 3, "mamba_d_state": 5}
        | {"mamba_d_conv": 3, "mamba_dt_rank": 7, "mamba_conv_bias": False, "mamba_proj_bias": True},
    ),
    "jamba_dense": (
        "jamba",
        UNTIED | {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 3, "attn_layer_offset": 2},
    ),
}

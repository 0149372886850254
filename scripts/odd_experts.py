"""Lists odd configurations of models with experts, and of those with MLA."""

from __future__ import annotations

from typing import Any

from odd_parts import (
    DYNAMIC,
    EACH_KV,
    ERNIE,
    FIVE_HEADS,
    GROUPED,
    HALF,
    INDEX,
    LINEAR,
    MLA,
    MULTIPLIED,
    ONE_KV,
    QUARTER,
    SLIDING,
    THREE_HEADS,
    TIED,
    UNTIED,
    rope,
    yarn,
)

EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral_window": ("mixtral", THREE_HEADS | UNTIED | {"sliding_window": 9} | rope()),
    "mixtral_one_expert": (
        "mixtral",
        FIVE_HEADS | TIED | {"num_experts_per_tok": 1, "sliding_window": None} | rope(300.0),
    ),
    "qwen3_moe_between": (
        "qwen3_moe",
        FIVE_HEADS | UNTIED | {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True} | rope(),
    ),
    "qwen3_moe_every_other": (
        "qwen3_moe",
        THREE_HEADS | TIED | {"decoder_sparse_step": 2, "norm_topk_prob": True} | yarn(),
    ),
    "glm4_moe_groups": (
        "glm4_moe",
        GROUPED
        | FIVE_HEADS
        | UNTIED
        | {"first_k_dense_replace": 1, "use_qk_norm": False, "attention_bias": True}
        | HALF,
    ),
    "glm4_moe_normed": (
        "glm4_moe",
        GROUPED
        | THREE_HEADS
        | TIED
        | {"first_k_dense_replace": 2, "use_qk_norm": True, "norm_topk_prob": False}
        | QUARTER,
    ),
    "solar_open_groups": ("solar_open", GROUPED | THREE_HEADS | UNTIED | yarn()),
    "solar_open_partial": (
        "solar_open",
        GROUPED | FIVE_HEADS | TIED | {"n_shared_experts": 1} | rope(partial_rotary_factor=1.0),
    ),
    "minimax_m2_half": ("minimax_m2", THREE_HEADS | UNTIED | HALF),
    "minimax_m2_one_kv": ("minimax_m2", FIVE_HEADS | TIED | rope(partial_rotary_factor=0.75)),
    "qwen2_moe_between": (
        "qwen2_moe",
        ONE_KV | UNTIED | {"mlp_only_layers": [0]} | rope(),
    ),
    "qwen2_moe_normed": (
        "qwen2_moe",
        EACH_KV
        | TIED
        | {"decoder_sparse_step": 2, "norm_topk_prob": True, "shared_expert_intermediate_size": 12}
        | rope(),
    ),
    "olmoe_one_kv": ("olmoe", ONE_KV | UNTIED | {"norm_topk_prob": True, "clip_qkv": None} | rope()),
    "olmoe_plain": ("olmoe", EACH_KV | TIED | {"norm_topk_prob": False, "attention_bias": False} | LINEAR),
    "granitemoe_one_kv": ("granitemoe", ONE_KV | MULTIPLIED | UNTIED | rope()),
    "granitemoe_one_expert": ("granitemoe", MULTIPLIED | TIED | {"num_experts_per_tok": 1} | yarn()),
    "granitemoeshared_tied": (
        "granitemoeshared",
        ONE_KV | MULTIPLIED | TIED | {"shared_intermediate_size": 28} | rope(),
    ),
    "granitemoeshared_none": (
        "granitemoeshared",
        EACH_KV | MULTIPLIED | UNTIED | {"shared_intermediate_size": 0} | rope(),
    ),
    "ernie4_5_moe_between": (
        "ernie4_5_moe",
        ERNIE
        | ONE_KV
        | TIED
        | {"moe_layer_interval": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 3}
        | rope(),
    ),
    "ernie4_5_moe_ends": (
        "ernie4_5_moe",
        ERNIE
        | UNTIED
        | {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_num_shared_experts": 0}
        | rope(100.0),
    ),
    "dots1_groups": (
        "dots1",
        GROUPED | THREE_HEADS | UNTIED | {"first_k_dense_replace": 1, "sliding_window": None} | rope(),
    ),
    "dots1_windows": (
        "dots1",
        GROUPED
        | FIVE_HEADS
        | TIED
        | {"first_k_dense_replace": 2, "sliding_window": 7, "layer_types": SLIDING, "attention_bias": True}
        | rope(),
    ),
    "hunyuan_moe_one_kv": (
        "hunyuan_v1_moe",
        FIVE_HEADS | UNTIED | {"num_experts": 7, "moe_topk": 3} | DYNAMIC,
    ),
    "hunyuan_moe_tied": (
        "hunyuan_v1_moe",
        THREE_HEADS | TIED | {"num_experts": 5, "moe_topk": 1} | rope(100.0),
    ),
    "deepseek_v2_groups": (
        "deepseek_v2",
        MLA | UNTIED | {"topk_method": "group_limited_greedy", "norm_topk_prob": False} | rope(),
    ),
    "deepseek_v2_three_heads": (
        "deepseek_v2",
        MLA
        | TIED
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": None, "topk_method": "greedy"}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}
        | yarn(mscale=0.7, mscale_all_dim=0.7),
    ),
    "deepseek_v3_groups": ("deepseek_v3", MLA | UNTIED | yarn(mscale=1.0, mscale_all_dim=1.0)),
    "deepseek_v3_no_groups": (
        "deepseek_v3",
        MLA
        | TIED
        | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "num_attention_heads": 5, "num_key_value_heads": 5}
        | {"kv_lora_rank": 48, "first_k_dense_replace": 2}
        | yarn(mscale_all_dim=0.0),
    ),
    "glm4_moe_lite_groups": (
        "glm4_moe_lite",
        MLA | UNTIED | {"mlp_layer_types": ["dense", "sparse", "sparse"]} | rope(300.0),
    ),
    "glm4_moe_lite_tied": (
        "glm4_moe_lite",
        MLA | TIED | {"mlp_layer_types": ["sparse"] * 3, "n_group": 1, "topk_group": 1, "v_head_dim": 16} | rope(),
    ),
    "deepseek_v2_odd_latents": (
        "deepseek_v2",
        MLA
        | UNTIED
        | {"kv_lora_rank": 22, "qk_rope_head_dim": 10, "topk_method": "greedy", "norm_topk_prob": False}
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "n_group": 1, "topk_group": 1}
        | rope(700.0),
    ),
    "kimi_k2_odd_latents": (
        "deepseek_v3",
        MLA
        | UNTIED
        | {"kv_lora_rank": 50, "qk_rope_head_dim": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
        | {"routed_scaling_factor": 2.8, "num_hidden_layers": 4}
        | yarn(mscale=1.0, mscale_all_dim=1.0),
    ),
    "glm4_moe_lite_odd_latents": (
        "glm4_moe_lite",
        MLA
        | UNTIED
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "kv_lora_rank": 36, "qk_rope_head_dim": 14}
        | {"num_attention_heads": 5, "num_key_value_heads": 5}
        | rope(),
    ),
    "deepseek_v32_few": ("deepseek_v32", MLA | INDEX | UNTIED | yarn(mscale=1.0, mscale_all_dim=1.0)),
    "deepseek_v32_many": (
        "deepseek_v32",
        MLA
        | INDEX
        | TIED
        | {"index_topk": 301, "index_head_dim": 16, "kv_lora_rank": 18, "first_k_dense_replace": 0}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "n_group": 1, "topk_group": 1}
        | rope(300.0),
    ),
    "glm_moe_dsa_shared": (
        "glm_moe_dsa",
        MLA | INDEX | UNTIED | {"indexer_types": ["full", "shared", "full", "shared"], "num_hidden_layers": 4} | rope(),
    ),
    "glm_moe_dsa_each": (
        "glm_moe_dsa",
        MLA
        | INDEX
        | UNTIED
        | {"index_topk": 130, "qk_rope_head_dim": 10, "index_head_dim": 18, "mlp_layer_types": ["sparse"] * 3}
        | rope(2000.0),
    ),
    "gpt_oss_windows": (
        "gpt_oss",
        THREE_HEADS | UNTIED | {"sliding_window": 5, "layer_types": SLIDING} | yarn(truncate=False),
    ),
    "gpt_oss_one_kv": (
        "gpt_oss",
        FIVE_HEADS | UNTIED | {"sliding_window": 60, "layer_types": SLIDING[::-1]} | yarn(),
    ),
}

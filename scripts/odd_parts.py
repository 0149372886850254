"""Holds what odd configurations have in common: their sizes, and parts that they are put together of."""

from __future__ import annotations

from typing import Any

SIZES = {
    "vocab_size": 44,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 7,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
ONE_KV = {"num_key_value_heads": 1}
EACH_KV = {"num_key_value_heads": 4}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}  # 48 in all, of a width of 40
FIVE_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24}
BIASES = {"attention_bias": True, "mlp_bias": True}
ALL_FULL = ["full_attention"] * 3
SLIDING = ["full_attention", "sliding_attention", "sliding_attention"]


def rope(theta: float = 10000.0, **others: Any) -> dict[str, Any]:
    """Returns a RoPE of that base, plain or as the other fields say."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | others}


def yarn(**others: Any) -> dict[str, Any]:
    """Returns a YaRN that the prompt takes far beyond its original context."""
    fields = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
    return rope(500.0, **fields | others)


def proportional(rotated: float) -> dict[str, Any]:
    """Returns the RoPEs of Gemma 4, of which one rotates that share of each head."""
    far = {"rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": rotated}
    return {"rope_parameters": {"full_attention": far, "sliding_attention": rope(500.0)["rope_parameters"]}}


LLAMA3 = rope(
    5000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LINEAR = rope(rope_type="linear", factor=3.0)
HALF, QUARTER = rope(partial_rotary_factor=0.5), rope(partial_rotary_factor=0.25)
GROUPED = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
MLA = GROUPED | {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
INDEX = {"index_head_dim": 22, "index_n_heads": 11, "index_topk": 23}
MULTIPLIED = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.6,
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
FIRST_FULL = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
ERNIE = {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 20, "moe_num_shared_experts": 2}
DYNAMIC = rope(100.0, rope_type="dynamic", alpha=5.0, factor=1.0)
BOTH_ROPES = {
    "rope_parameters": {
        "full_attention": yarn()["rope_parameters"],
        "sliding_attention": rope(500.0)["rope_parameters"],
    }
}
TWO_BASES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
}
MAMBA2 = {
    "mamba_d_conv": 3,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_n_heads": 10,
}
LLAMA4 = {
    "intermediate_size_mlp": 60,
    "attn_temperature_tuning": True,
    "floor_scale": 30,
    "attn_scale": 0.3,
    "no_rope_layers": [1, 0, 1],
}
NEMOTRON = UNTIED | {
    "mamba_num_heads": 10,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "conv_kernel": 3,
    "moe_shared_expert_intermediate_size": 28,
    "time_step_min": 1e-9,
}
KIMI = {
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 10,
    "v_head_dim": 14,
    "num_local_experts": 12,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
PER_LAYER = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": SIZES["vocab_size"]}
GEMMA3N = PER_LAYER | {"activation_sparsity_pattern": [0.0, 0.7, 0.0]}
QUARTER_OF_EIGHT = {"num_attention_heads": 5, "num_key_value_heads": 5} | QUARTER

"""Makes tests/models/odd: configurations that nobody has published, against what transformers computes of them.

A golden is the config.json that transformers writes, and expected.npz: the names and shapes of its tensors, a prompt of
330 tokens, its logits at 24 positions, and 20 greedy steps. Weights are not stored: here and in tests,
tests/models/odd_weights.py makes them out of names and shapes. Of an encoder there are hidden states and no steps.

To add one, write a line in `GOLDENS`: a name, transformers' model type and what its config says besides `SIZES`, of
which a config takes what it knows. Then run the script with the name; tests/models/test_odd_goldens.py takes every
folder that it finds. Needs torch and transformers, which the project itself does not:

    python scripts/make_odd_goldens.py [NAME ...]
"""

from __future__ import annotations

import json
import shutil
import sys
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

TESTS = Path(__file__).parents[1] / "tests" / "models"
sys.path.insert(0, str(TESTS))
from odd_weights import random_weights  # noqa: E402

FOLDER = TESTS / "odd"
PROMPT, POSITIONS, STEPS = 330, 24, 20
SPECIAL = 3  # the first tokens, which are not in prompts: RoBERTa gives padding no position
PROMPTS = 25  # that are tried
MARGIN = 0.01  # between the best and the next token of every greedy step
NOISE = 1e-7  # relative; what it changes shows whether a router's choice hangs by a thread

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
GOLDENS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_wide_heads": ("llama", EACH_KV | {"head_dim": 24} | UNTIED | LLAMA3),
    "llama_five_heads": ("llama", FIVE_HEADS | BIASES | TIED | rope(1000.0)),
    "llama_yarn": ("llama", ONE_KV | UNTIED | yarn()),
    "llama_yarn_in_parts": ("llama", EACH_KV | TIED | yarn(truncate=False, beta_slow=2.0)),
    "llama_linear": ("llama", {"head_dim": 32, "mlp_bias": True} | ONE_KV | LINEAR),
    "llama4_chunks": ("llama4_text", LLAMA4 | FIVE_HEADS | UNTIED | {"attention_chunk_size": 50} | rope()),
    "llama4_all_experts": (
        "llama4_text",
        LLAMA4 | ONE_KV | TIED | {"head_dim": 24, "interleave_moe_layer_step": 1, "num_experts_per_tok": 2} | LLAMA3,
    ),
    "llama4_small_chunks": (
        "llama4_text",
        LLAMA4
        | ONE_KV
        | TIED
        | {"head_dim": 16, "num_hidden_layers": 5, "no_rope_layers": [1, 1, 0, 1, 0], "attention_chunk_size": 7}
        | {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1, "attention_bias": True}
        | LINEAR,
    ),
    "llama4_dense_ends": (
        "llama4_text",
        LLAMA4
        | THREE_HEADS
        | UNTIED
        | {"moe_layers": [0], "attention_chunk_size": 33, "use_qk_norm": False, "attn_temperature_tuning": False}
        | {"no_rope_layers": [0, 1, 1], "layer_types": ["full_attention", "chunked_attention", "full_attention"]}
        | rope(300.0),
    ),
    "mistral_three_heads": ("mistral", THREE_HEADS | {"sliding_window": 7} | UNTIED | rope(1000.0)),
    "mistral_no_window": ("mistral", FIVE_HEADS | {"sliding_window": None} | TIED | LLAMA3),
    "ministral_one_window": (
        "ministral",
        ONE_KV | {"head_dim": 12, "sliding_window": 5, "layer_types": SLIDING} | rope(),
    ),
    "ministral_last_full": (
        "ministral",
        THREE_HEADS | TIED | {"sliding_window": 33, "layer_types": SLIDING[::-1]} | rope(300.0),
    ),
    "qwen2_three_heads": ("qwen2", THREE_HEADS | UNTIED | rope(1000000.0)),
    "qwen2_windows": (
        "qwen2",
        ONE_KV
        | {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "layer_types": SLIDING}
        | rope(),
    ),
    "qwen2_yarn": ("qwen2", TIED | yarn(attention_factor=1.3)),
    "qwen3_five_heads": ("qwen3", FIVE_HEADS | UNTIED | yarn(truncate=False)),
    "qwen3_biases": ("qwen3", THREE_HEADS | {"attention_bias": True} | TIED | rope(100.0)),
    "qwen3_windows": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "layer_types": SLIDING}
        | rope(),
    ),
    "granite_biases": ("granite", ONE_KV | MULTIPLIED | BIASES | UNTIED | rope(1000.0)),
    "granite_five_heads": (
        "granite",
        MULTIPLIED | TIED | {"num_attention_heads": 5, "num_key_value_heads": 5, "attention_multiplier": 0.05} | yarn(),
    ),
    "smollm3_some_rope": ("smollm3", ONE_KV | UNTIED | {"no_rope_layers": [0, 1, 0]} | rope(1000.0)),
    "smollm3_all_rope": ("smollm3", EACH_KV | TIED | {"no_rope_layers": [1, 1, 1]} | BIASES | yarn()),
    "phi3_window": ("phi3", EACH_KV | UNTIED | {"sliding_window": 9} | rope()),
    "phi3_partial": ("phi3", ONE_KV | TIED | {"num_attention_heads": 5, "sliding_window": None} | HALF),
    "phi3_short": (
        "phi3",
        UNTIED
        | {"original_max_position_embeddings": 400, "max_position_embeddings": 400, "sliding_window": None}
        | rope(
            rope_type="longrope",
            short_factor=[1.0, 1.1, 1.4, 2.0, 3.0],
            long_factor=[1.0, 2.0, 4.0, 6.0, 8.0],
            original_max_position_embeddings=400,
        ),
    ),
    "olmo2_one_kv": ("olmo2", ONE_KV | TIED | rope(1000.0)),
    "olmo2_biases": ("olmo2", EACH_KV | {"attention_bias": True} | UNTIED | LLAMA3),
    "olmo3_windows": ("olmo3", ONE_KV | UNTIED | {"sliding_window": 6, "layer_types": SLIDING} | BOTH_ROPES),
    "olmo3_last_full": (
        "olmo3",
        EACH_KV | TIED | {"sliding_window": 70, "layer_types": SLIDING[::-1]} | BOTH_ROPES,
    ),
    "gemma_five_heads": ("gemma", FIVE_HEADS | TIED | rope()),
    "gemma_three_heads": ("gemma", THREE_HEADS | TIED | rope(200.0)),
    "gemma2_caps": (
        "gemma2",
        FIVE_HEADS
        | TIED
        | {
            "query_pre_attn_scalar": 30,
            "sliding_window": 5,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        }
        | rope(),
    ),
    "gemma2_no_caps": (
        "gemma2",
        THREE_HEADS
        | TIED
        | {
            "hidden_size": 42,
            "sliding_window": 40,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": SLIDING,
        }
        | rope(500.0),
    ),
    "gemma3_windows": (
        "gemma3_text",
        FIVE_HEADS | TIED | {"query_pre_attn_scalar": 50, "sliding_window": 3, "layer_types": SLIDING} | TWO_BASES,
    ),
    "gemma3_seven_layers": (
        "gemma3_text",
        THREE_HEADS
        | TIED
        | {"hidden_size": 42, "num_hidden_layers": 7, "query_pre_attn_scalar": 16, "sliding_window": 20}
        | TWO_BASES,
    ),
    "gemma3n_early_sharing": (
        "gemma3n_text",
        GEMMA3N
        | FIVE_HEADS
        | TIED
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 4, "sliding_window": 5, "laurel_rank": 7}
        | {"layer_types": ["full_attention", "sliding_attention", *SLIDING, "full_attention"]}
        | {"intermediate_size": [52, 20, 36, 52, 28, 44], "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.9, 0.0, 0.3]}
        | TWO_BASES,
    ),
    "gemma3n_two_streams": (
        "gemma3n_text",
        GEMMA3N
        | THREE_HEADS
        | UNTIED
        | {"hidden_size": 42, "altup_num_inputs": 2, "altup_active_idx": 1, "num_kv_shared_layers": 0}
        | {"sliding_window": 21, "layer_types": SLIDING, "laurel_rank": 3, "final_logit_softcapping": 6.0}
        | TWO_BASES,
    ),
    "gemma3n_all_but_one": (
        "gemma3n_text",
        GEMMA3N
        | ONE_KV
        | TIED
        | {"head_dim": 12, "altup_num_inputs": 5, "altup_active_idx": 4, "num_kv_shared_layers": 2, "laurel_rank": 9}
        | {"sliding_window": 3, "layer_types": ["sliding_attention"] * 3, "attention_bias": True}
        | TWO_BASES,
    ),
    "gemma4_two_sizes": (
        "gemma4_text",
        PER_LAYER
        | FIVE_HEADS
        | TIED
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "head_dim": 12, "global_head_dim": 20}
        | {"layer_types": [*SLIDING[1:], *SLIDING, "full_attention"], "sliding_window": 7, "use_double_wide_mlp": True}
        | proportional(0.3),
    ),
    "gemma4_experts": (
        "gemma4_text",
        UNTIED
        | {"head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"layer_types": SLIDING[::-1], "sliding_window": 9, "hidden_size_per_layer_input": 0, "hidden_size": 44}
        | {"enable_moe_block": True, "top_k_experts": 3, "final_logit_softcapping": 8.0}
        | proportional(0.75),
    ),
    "gemma4_narrow_global": (
        "gemma4_text",
        PER_LAYER
        | THREE_HEADS
        | TIED
        | {"head_dim": 24, "global_head_dim": 8, "layer_types": [*SLIDING, "full_attention"], "num_hidden_layers": 4}
        | {"sliding_window": 40, "enable_moe_block": True, "top_k_experts": 1, "attention_bias": True}
        | proportional(1.0),
    ),
    "vaultgemma_caps": (
        "vaultgemma",
        THREE_HEADS
        | TIED
        | {
            "hidden_size": 42,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
        }
        | rope(),
    ),
    "vaultgemma_no_caps": (
        "vaultgemma",
        FIVE_HEADS
        | TIED
        | {
            "sliding_window": 21,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": SLIDING,
        }
        | rope(),
    ),
    "gpt2_five_heads": ("gpt2", {"num_attention_heads": 5, "n_inner": 52} | TIED),
    "gpt2_own_scales": (
        "gpt2",
        {"activation_function": "gelu", "n_inner": None, "scale_attn_weights": True} | TIED,
    ),
    "starcoder2_window": (
        "starcoder2",
        ONE_KV | TIED | {"sliding_window": 8, "hidden_act": "gelu_pytorch_tanh"} | rope(),
    ),
    "starcoder2_untied": (
        "starcoder2",
        EACH_KV | UNTIED | {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"} | rope(300.0),
    ),
    "glm_half": ("glm", THREE_HEADS | UNTIED | {"attention_bias": True} | HALF),
    "glm_whole": ("glm", FIVE_HEADS | TIED | {"attention_bias": False} | rope(partial_rotary_factor=1.0)),
    "glm4_half": ("glm4", FIVE_HEADS | TIED | {"attention_bias": True} | HALF),
    "glm4_quarter": ("glm4", THREE_HEADS | UNTIED | {"attention_bias": False} | QUARTER),
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
    "ernie4_5_three_heads": ("ernie4_5", THREE_HEADS | UNTIED | rope(1000.0)),
    "ernie4_5_biases": ("ernie4_5", FIVE_HEADS | TIED | {"use_bias": True} | rope()),
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
    "hunyuan_five_heads": ("hunyuan_v1_dense", FIVE_HEADS | TIED | rope(300.0)),
    "hunyuan_three_heads": ("hunyuan_v1_dense", THREE_HEADS | UNTIED | DYNAMIC),
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
    "seed_oss_three_heads": ("seed_oss", THREE_HEADS | TIED | {"attention_out_bias": True, "mlp_bias": True} | rope()),
    "seed_oss_no_biases": ("seed_oss", FIVE_HEADS | UNTIED | {"attention_bias": False} | LLAMA3),
    "cohere_biases": ("cohere", ONE_KV | TIED | {"logit_scale": 0.4, "attention_bias": True} | rope()),
    "cohere_normed": ("cohere", ONE_KV | TIED | {"use_qk_norm": True, "logit_scale": 0.4} | rope()),
    "cohere_five_heads": (
        "cohere",
        {"num_attention_heads": 5, "num_key_value_heads": 5, "logit_scale": 1.2} | TIED | LINEAR,
    ),
    "cohere2_windows": (
        "cohere2",
        ONE_KV | TIED | {"sliding_window": 4, "logit_scale": 0.5, "layer_types": SLIDING} | rope(),
    ),
    "cohere2_biases": (
        "cohere2",
        EACH_KV
        | TIED
        | {"sliding_window": 40, "num_hidden_layers": 5, "attention_bias": True, "logit_scale": 0.7}
        | rope(300.0),
    ),
    "stablelm_biases": ("stablelm", ONE_KV | TIED | {"num_attention_heads": 5, "use_qkv_bias": True} | HALF),
    "stablelm_normed": ("stablelm", ONE_KV | TIED | {"num_attention_heads": 5, "qk_layernorm": True} | HALF),
    "stablelm_parallel": (
        "stablelm",
        {"num_attention_heads": 5, "num_key_value_heads": 5, "use_parallel_residual": True}
        | UNTIED
        | rope(partial_rotary_factor=0.75),
    ),
    "exaone4_windows": ("exaone4", ONE_KV | TIED | {"sliding_window": 6, "layer_types": SLIDING} | LLAMA3),
    "exaone4_plain": ("exaone4", EACH_KV | UNTIED | {"sliding_window": None, "layer_types": ALL_FULL} | rope()),
    "cwm_windows": ("cwm", FIVE_HEADS | TIED | {"sliding_window": 5, "layer_types": SLIDING} | LLAMA3),
    "cwm_last_full": ("cwm", UNTIED | {"head_dim": 16, "sliding_window": 50, "layer_types": SLIDING[::-1]} | rope()),
    "gpt_neox_serial": ("gpt_neox", UNTIED | {"num_attention_heads": 5, "use_parallel_residual": False} | HALF),
    "gpt_neox_no_biases": (
        "gpt_neox",
        TIED | {"attention_bias": False, "hidden_act": "gelu_new"} | rope(partial_rotary_factor=0.8),
    ),
    "phi_one_kv": ("phi", ONE_KV | UNTIED | {"num_attention_heads": 5, "hidden_act": "gelu_new"} | HALF),
    "phi_five_heads": (
        "phi",
        UNTIED
        | {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_act": "gelu_new"}
        | rope(partial_rotary_factor=0.75),
    ),
    "falcon_multi_query": ("falcon", TIED | {"num_attention_heads": 5, "bias": True} | rope()),
    "falcon_new": (
        "falcon",
        UNTIED | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 52} | rope(),
    ),
    "falcon_each": ("falcon", TIED | {"multi_query": False, "parallel_attn": False, "bias": True} | rope(100.0)),
    "opt_five_heads": ("opt", TIED | {"num_attention_heads": 5, "ffn_dim": 52, "word_embed_proj_dim": 40}),
    "opt_untied": ("opt", UNTIED | {"ffn_dim": 36, "word_embed_proj_dim": 40}),
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
    "bert_five_heads": ("bert", {"num_attention_heads": 5}),
    "roberta_relu": (
        "roberta",
        {"hidden_act": "gelu", "pad_token_id": 1, "max_position_embeddings": 350, "type_vocab_size": 1},
    ),
    "distilbert_five_heads": ("distilbert", {"n_heads": 5, "hidden_dim": 52}),
    "mpnet_five_heads": ("mpnet", {"num_attention_heads": 5, "pad_token_id": 1, "max_position_embeddings": 340}),
    "mpnet_relu": ("mpnet", {"hidden_act": "relu", "pad_token_id": 1, "hidden_size": 42, "num_attention_heads": 3}),
    "modernbert_window": ("modernbert", {"local_attention": 6, "num_hidden_layers": 4}),
    "modernbert_five_heads": ("modernbert", {"num_attention_heads": 5, "local_attention": 64}),
    "nomic_bert_five_heads": ("nomic_bert", {"num_attention_heads": 5} | rope(300.0)),
    "embeddinggemma_window": (
        "gemma3_text",
        FIVE_HEADS
        | TIED
        | {
            "sliding_window": 9,
            "layer_types": SLIDING,
            "query_pre_attn_scalar": 30,
            "use_bidirectional_attention": True,
        }
        | TWO_BASES,
    ),
}


def main() -> None:
    torch.set_num_threads(1)  # more cost more than they save
    for name in sys.argv[1:] or GOLDENS:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        kind, says = GOLDENS[name]
        config = config_of(kind, says)
        with TemporaryDirectory() as folder:
            shapes = write_weights(config, Path(folder))
            model = loaded(config, Path(folder))
            (FOLDER / name).mkdir(parents=True)
            shutil.copy(Path(folder) / "config.json", FOLDER / name)
        weights = np.array(json.dumps(shapes, separators=(",", ":")))
        np.savez_compressed(FOLDER / name / "expected.npz", weights=weights, **expected_of(model, name))
        print(f"{name:32} {sum(file.stat().st_size for file in (FOLDER / name).iterdir()):7} bytes")


def config_of(kind: str, says: dict[str, Any]) -> PreTrainedConfig:
    """Returns a config that says `says`, and of `SIZES` what its class has a field for."""
    other = CONFIG_MAPPING[kind].attribute_map
    known = {field.name for field in fields(CONFIG_MAPPING[kind])}
    known |= {key for key in other if other[key] not in SIZES | says}
    return CONFIG_MAPPING[kind](**deepcopy({key: size for key, size in SIZES.items() if key in known} | says))


def is_encoder(config: PreTrainedConfig) -> bool:
    named = "bert" in config.model_type or config.model_type == "mpnet"
    return named or bool(getattr(config, "use_bidirectional_attention", False))


def kind_of(config: PreTrainedConfig) -> type[AutoModel]:
    return AutoModel if is_encoder(config) else AutoModelForCausalLM


def write_weights(config: PreTrainedConfig, folder: Path) -> dict[str, list[int]]:
    """Writes a checkpoint with the tensors that transformers saves, each made out of its name; returns their shapes."""
    model = kind_of(config).from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.offset_keys()}
    save_file(random_weights(config.to_dict(), shapes), folder / "model.safetensors", {"format": "pt"})
    return shapes


def loaded(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    model, report = kind_of(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def computed(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of all positions, or an encoder's hidden states."""
    with torch.no_grad():
        answer = model(torch.tensor(tokens)[None])
    return (answer.last_hidden_state if is_encoder(model.config) else answer.logits)[0].float().numpy()


def expected_of(model: PreTrainedModel, name: str) -> dict[str, np.ndarray]:
    """Returns what a backend must compute. Prompts are tried until rounding decides neither over an expert nor over a
    token."""
    positions = np.linspace(0, PROMPT - 1, POSITIONS).astype(np.int32)
    for seed in range(crc32(name.encode()), crc32(name.encode()) + PROMPTS):
        tokens = np.random.default_rng(seed).integers(SPECIAL, model.config.vocab_size, size=PROMPT)
        logits = computed(model, tokens)
        if not is_steady(model, tokens, logits):
            continue
        assert 0.3 < logits.std() < 30, f"{name}: logits of a deviation of {logits.std()}"
        expected = {"tokens": tokens.astype(np.uint8), "positions": positions, "logits": logits[positions]}
        if is_encoder(model.config):
            return expected
        steps = greedy(model, tokens)
        best = np.sort(steps, axis=1)
        if (best[:, -1] - best[:, -2]).min() > MARGIN:
            return expected | {"steps": steps}
    raise AssertionError(f"{name}: every prompt hangs by a thread")


def is_steady(model: PreTrainedModel, tokens: np.ndarray, logits: np.ndarray) -> bool:
    """Returns whether a little noise in all matrices changes the logits no more than rounding may."""
    saved = {key: weight.clone() for key, weight in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator))
    moved = np.abs(computed(model, tokens) - logits).max()
    model.load_state_dict(saved)
    return bool(moved < 2e-4)


def greedy(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits that each greedy step chooses from."""
    steps: list[np.ndarray] = []
    for _ in range(STEPS):
        steps.append(computed(model, tokens)[-1])
        tokens = np.append(tokens, steps[-1].argmax())
    return np.stack(steps)


if __name__ == "__main__":
    main()

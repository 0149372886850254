"""Lists odd configurations of dense models, encoders included, and of Llama 4 and Gemma, which may have experts."""

from __future__ import annotations

from typing import Any

from odd_parts import (
    ALL_FULL,
    BIASES,
    BOTH_ROPES,
    DYNAMIC,
    EACH_KV,
    FIVE_HEADS,
    GEMMA3N,
    HALF,
    LINEAR,
    LLAMA3,
    LLAMA4,
    MULTIPLIED,
    ONE_KV,
    PER_LAYER,
    QUARTER,
    SLIDING,
    THREE_HEADS,
    TIED,
    TWO_BASES,
    UNTIED,
    proportional,
    rope,
    yarn,
)

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
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
    "ernie4_5_three_heads": ("ernie4_5", THREE_HEADS | UNTIED | rope(1000.0)),
    "ernie4_5_biases": ("ernie4_5", FIVE_HEADS | TIED | {"use_bias": True} | rope()),
    "hunyuan_five_heads": ("hunyuan_v1_dense", FIVE_HEADS | TIED | rope(300.0)),
    "hunyuan_three_heads": ("hunyuan_v1_dense", THREE_HEADS | UNTIED | DYNAMIC),
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

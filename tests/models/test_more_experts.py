"""Further families with experts: what their published configs say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.load import open_checkpoint, read_fields
from penstock.model.spec import ExpertSpec, MlaSpec
from tests.models.config_json import read_config

ALL = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
QWEN1_5 = ALL | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMOE = ALL | {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}
GRANITE_3B = ALL | {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 131072,
    "model_type": "granitemoe",
    "num_attention_heads": 24,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 40,
    "output_router_logits": False,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}
ERNIE_0_3B = ALL | {
    "architectures": ["Ernie4_5ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
ERNIE_21B = {key: value for key, value in ERNIE_0_3B.items() if key != "head_dim"} | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
}
DOTS = ALL | {
    "architectures": ["Dots1ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "model_type": "dots1",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
SOLAR = ALL | {
    "architectures": ["SolarOpenForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "model_type": "solar_open",
    "moe_intermediate_size": 1280,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"},
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 196608,
}
GLM_FLASH = ALL | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
HUNYUAN_A13B = ALL | {
    "add_classification_head": False,
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "bos_token_id": 1,
    "cla_share_factor": 2,
    "class_num": 0,
    "eod_token_id": 127967,
    "eos_token_id": 127960,
    "group_limited_greedy": False,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "mask_init_id": 12,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_moe",
    "moe_drop_tokens": False,
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_random_routing_dropped_token": False,
    "moe_topk": [8] * 32,
    "norm_topk_prob": True,
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "org_vocab_size": 128167,
    "pad_token_id": 127961,
    "pool_type": "last",
    "position_embedding_xdrope": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "sep_token_id": 127962,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_mla": False,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
PUBLISHED = [QWEN1_5, OLMOE, GRANITE_3B, ERNIE_0_3B, ERNIE_21B, DOTS, SOLAR, GLM_FLASH, HUNYUAN_A13B]


@pytest.mark.parametrize("config", PUBLISHED, ids=[config["model_type"] for config in PUBLISHED])
def test_every_field_of_published_configs_is_known(config: dict[str, Any]):
    reader = ConfigReader(config, "config.json")
    read_fields(reader)
    assert reader.unknown == []


def test_qwen2_moe():
    spec = read_config(QWEN1_5)
    assert spec.experts == ExpertSpec(60, 4, 1408)
    assert (spec.shared_hidden, spec.shared_gated, spec.dense, spec.attn.window) == (5632, True, frozenset(), 0)
    assert spec.biases == {"q", "k", "v"}
    assert read_config(QWEN1_5 | {"qkv_bias": False}).biases == frozenset()
    spec = read_config(QWEN1_5 | {"use_sliding_window": True, "max_window_layers": 3, "mlp_only_layers": [2]})
    assert [spec.attention(layer).window for layer in range(5)] == [32768, 0, 32768, 0, 0]
    assert spec.dense == {2}


def test_olmoe():
    spec = read_config(OLMOE)
    assert (spec.experts, spec.attn.qk_norm) == (ExpertSpec(64, 8, 1024), "all")
    assert read_config(OLMOE | {"norm_topk_prob": True}).experts == ExpertSpec(64, 8, 1024, renormalize=True)


def test_granite_moe():
    spec = read_config(GRANITE_3B)
    assert spec.experts == ExpertSpec(40, 8, 512, renormalize=True)
    assert (spec.logit_scale, spec.attn.scale, spec.shared_hidden) == (1 / 6, 0.015625, 0)
    shared = GRANITE_3B | {"architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": 1024}
    assert read_config(shared).shared_hidden == 1024


def test_ernie():
    spec = read_config(ERNIE_0_3B)
    assert (spec.attn.rope.interleaved, spec.attn.q_width, spec.tied, spec.experts) == (True, 2048, True, None)
    assert len(read_config(ERNIE_0_3B | {"use_bias": True}).biases) == 7


def test_ernie_with_experts():
    spec = read_config(ERNIE_21B)
    assert spec.experts == ExpertSpec(64, 6, 1536, renormalize=True, choice_bias=True)
    assert (spec.attn.rope.interleaved, spec.attn.head_dim, spec.shared_hidden, spec.dense) == (True, 128, 3072, {0})
    some = {"num_hidden_layers": 8, "moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 6}
    assert read_config(ERNIE_21B | some).dense == {0, 1, 2, 4, 6, 7}


def test_ernie_leaves_out_what_guesses_further_tokens(folder_with, floats):
    extra = {"model.mtp_block.0.self_attn.q_proj.weight": floats(4), "model.mtp_linear_proj.0.weight": floats(4)}
    assert open_checkpoint(folder_with("ernie4_5_moe", tensors=lambda tensors: tensors.update(extra)))


def test_dots():
    spec = read_config(DOTS)
    assert spec.experts == ExpertSpec(128, 6, 1408, scoring="sigmoid", renormalize=True, scale=2.5, choice_bias=True)
    assert (spec.attn.qk_norm, spec.dense, spec.shared_hidden) == ("head", {0}, 2816)
    spec = read_config(DOTS | {"sliding_window": 512, "max_window_layers": 60})
    assert [spec.attention(layer).window for layer in (59, 60, 61)] == [0, 512, 512]


def test_hunyuan_with_experts():
    spec = read_config(HUNYUAN_A13B)
    assert spec.experts == ExpertSpec(64, 8, 3072, renormalize=True)
    assert (spec.shared_hidden, spec.attn.qk_norm, spec.attn.q_gain, spec.tied) == (3072, "head", True, True)
    two = HUNYUAN_A13B | {"num_shared_expert": 2, "moe_topk": 4}
    assert (read_config(two).shared_hidden, read_config(two).experts.top_k) == (6144, 4)


def test_solar_open():
    spec = read_config(SOLAR)
    assert spec.experts == ExpertSpec(128, 8, 1280, scoring="sigmoid", renormalize=True, choice_bias=True)
    assert (spec.attn.qk_norm, spec.dense, spec.shared_hidden, spec.biases) == ("", frozenset(), 1280, frozenset())
    silent = {key: value for key, value in SOLAR.items() if key not in ("intermediate_size", "partial_rotary_factor")}
    assert read_config(silent).attn == spec.attn


def test_glm_4_7_flash():
    spec = read_config(GLM_FLASH)
    assert spec.experts == ExpertSpec(64, 4, 1536, scoring="sigmoid", renormalize=True, scale=1.8, choice_bias=True)
    assert (spec.mla, spec.attn.head_dim, spec.attn.v_dim) == (MlaSpec(192, 256, 768), 576, 512)
    assert (spec.attn.rope.interleaved, spec.dense, spec.unused_layers) == (True, {0}, 1)
    newer = GLM_FLASH | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]}
    assert read_config(newer).dense == {1}


@pytest.mark.parametrize(
    ("config", "change", "error"),
    [
        (QWEN1_5, {"shared_expert_intermediate_size": None}, MalformedFile),
        (QWEN1_5, {"num_experts": 0}, MalformedFile),
        (OLMOE, {"clip_qkv": 8.0}, UnsupportedModel),
        (OLMOE, {"rms_norm_eps": None}, MalformedFile),
        (GRANITE_3B, {"shared_expert_intermediate_size": 512}, UnsupportedModel),
        (ERNIE_0_3B, {"head_dim": None}, MalformedFile),
        (ERNIE_21B, {"use_bias": True}, UnsupportedModel),
        (ERNIE_21B, {"moe_norm_min": 0.5}, UnsupportedModel),
        (ERNIE_21B, {"moe_layer_end_index": -2}, MalformedFile),
        (DOTS, {"scoring_func": "softmax"}, UnsupportedModel),
        (DOTS, {"moe_layer_freq": 2}, UnsupportedModel),
        (DOTS, {"n_shared_experts": None}, MalformedFile),
        (HUNYUAN_A13B, {"moe_topk": [8] * 31 + [4]}, MalformedFile),
        (HUNYUAN_A13B, {"use_mla": True}, UnsupportedModel),
        (HUNYUAN_A13B, {"norm_topk_prob": False}, UnsupportedModel),
        (SOLAR, {"first_k_dense_replace": 1}, UnsupportedModel),
        (SOLAR, {"use_qk_norm": True}, UnsupportedModel),
        (GLM_FLASH, {"mlp_layer_types": ["dense"]}, UnsupportedModel),
        (GLM_FLASH, {"routed_scaling_factor": None}, MalformedFile),
        (GLM_FLASH, {"scoring_func": "softmax"}, UnsupportedModel),
    ],
)
def test_what_is_not_computed(config: dict[str, Any], change: dict[str, Any], error: type[Exception]):
    with pytest.raises(error, match=next(iter(change))):
        read_config(config | change)

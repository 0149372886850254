"""Kimi-Linear: what the published config says, what transformers calls the same, and what is refused."""

from __future__ import annotations

import pytest

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.load import open_checkpoint, read_fields
from penstock.model.recurrence import DeltaSpec
from tests.models.config_json import read_config

FULL = (4, 8, 12, 16, 20, 24, 27)
PUBLISHED = {  # as moonshotai/Kimi-Linear-48B-A3B-Instruct has it
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": list(FULL),
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_the_published_config():
    config = ConfigReader(PUBLISHED, "config.json")
    spec = read_fields(config)
    assert not config.unknown
    assert spec.recurrence == DeltaSpec(32, 32, 128, 128, 4, channel_decay=True, gate="sigmoid")
    assert [layer + 1 for layer in spec.attention_layers] == list(FULL)
    assert (spec.attn.head_dim, spec.attn.v_dim, spec.attn.scale, spec.attn.rope.inv_freq) == (576, 512, 192**-0.5, ())
    assert (len(spec.cached_attention), spec.attn.kv_values, spec.dense) == (7, 576, {0})
    assert spec.state_bytes == 20 * 4 * (32 * 128 * 128 + 3 * 3 * 4096)  # 45 MB
    experts = spec.experts
    assert (experts.count, experts.top_k, experts.scale, experts.renormalize) == (256, 8, 2.446, True)
    assert (experts.scoring, experts.choice_bias, spec.shared_hidden, spec.max_len) == ("sigmoid", True, 1024, 2**20)


def test_the_words_of_transformers_mean_the_same():
    kinds = ["full_attention" if layer in FULL else "linear_attention" for layer in range(1, 28)]
    renamed = {
        "linear_attn_config": {"layer_types": kinds, "linear_head_dim": 128, "linear_num_heads": 32},
        "first_k_dense_replace": {"mlp_layer_types": ["dense"] + ["sparse"] * 26},
        "model_max_length": {"max_position_embeddings": 1048576},
        "num_experts": {"num_local_experts": 256},
        "num_experts_per_token": {"num_experts_per_tok": 8},
        "num_shared_experts": {"n_shared_experts": 1},
        "moe_renormalize": {"norm_topk_prob": True},
        "num_expert_group": {"n_group": 1},
    }
    for key, others in renamed.items():
        left = {name: value for name, value in PUBLISHED.items() if name != key}
        assert read_config(left | others) == read_config(PUBLISHED), key


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["sliding_attention"] * 27},
        {"mla_use_nope": False},
        {"mlp_layer_types": ["dense"]},
        {"moe_layer_freq": 2},
        {"moe_router_activation_func": "softmax"},
        {"num_key_value_heads": 8},
        {"final_logit_softcapping": 30.0},
    ],
)
def test_what_is_refused_by_name(change):
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        read_config(PUBLISHED | change)


def test_layers_that_are_named_twice_or_not_at_all():
    table = PUBLISHED["linear_attn_config"]
    for layers in ([*FULL, 1], FULL[1:]):
        with pytest.raises(MalformedFile, match=r"full_attn_layers and kda_layers .* must name each of 27 layers once"):
            read_config(PUBLISHED | {"linear_attn_config": table | {"full_attn_layers": list(layers)}})


def test_unknown_words_about_delta_nets_are_named():
    table = PUBLISHED["linear_attn_config"] | {"gate_lower_bound": -5.0}
    config = ConfigReader(PUBLISHED | {"linear_attn_config": table}, "config.json")
    read_fields(config)
    assert config.unknown == ["gate_lower_bound"]


def test_groups_of_experts_count_only_if_the_config_says_so():
    grouped = PUBLISHED | {"num_expert_group": 8, "topk_group": 4}
    assert (read_config(grouped).experts.groups, read_config(grouped).experts.top_k_groups) == (8, 4)
    assert read_config(grouped | {"use_grouped_topk": False}) == read_config(PUBLISHED)


def test_a_file_says_for_each_layer_what_it_has(gguf_with):
    path = gguf_with("kimi_linear", lambda metadata: metadata.update({"kimi-linear.attention.head_count_kv": [0, 1]}))
    with pytest.raises(UnsupportedModel, match=r"head_count_kv = \[0, 1\] .* a number for each of 3 layers"):
        open_checkpoint(path)

"""Hybrid models: what published configs say, what files have besides, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.load import load_model, open_checkpoint, read_fields
from tests.models.config_json import read_config

GOLDENS = Path(__file__).parent / "goldens"
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_5_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 248320,
}
MOE = {
    "mlp_only_layers": [],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
DENSE = {"intermediate_size": 17408, "model_type": "qwen3_5_text", "output_gate_type": "swish"}
SEES = {
    "image_token_id": 248056,
    "language_model_only": False,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def qwen3_5(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    return SEES | {"architectures": [kind], "text_config": QWEN3_5_TEXT | text}


def test_qwen3_next_has_three_delta_nets_for_each_attention():
    spec = read_config(QWEN3_NEXT)
    assert (len(spec.cached_attention), sorted(spec.recurrent)[:4], spec.attn.qk_norm) == (12, [0, 1, 2, 4], "head")
    assert (len(spec.attn.rope.inv_freq), spec.gain_offset, spec.experts.renormalize) == (32, 1, True)
    assert (spec.experts.count, spec.experts.top_k, spec.shared_hidden, spec.shared_gated) == (512, 10, 512, True)
    assert spec.recurrence.width == 8192
    assert spec.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * 8192)  # 79 MB


def test_qwen3_5_is_read_where_it_speaks_of_text():
    experts = read_config(qwen3_5("Qwen3_5MoeForConditionalGeneration", MOE))
    assert (experts.experts.count, experts.experts.renormalize, len(experts.cached_attention), experts.tied) == (
        256,
        True,
        10,
        False,
    )
    dense = qwen3_5("Qwen3_5ForConditionalGeneration", DENSE)
    spec = read_config(dense)
    assert (spec.experts, spec.hidden, len(spec.recurrent), spec.vocab) == (None, 17408, 30, 248320)
    alone = {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": False} | dense["text_config"]
    assert read_config(alone) == spec
    assert read_config(dense | {"tie_word_embeddings": True}).tied


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"attn_output_gate": False},
        {"output_gate_type": "relu"},
        {"mamba_ssm_dtype": "bfloat16"},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["sliding_attention"] * 40},
        {"tie_word_embeddings": True},
        {"final_logit_softcapping": 30.0},
    ],
)
def test_what_qwen3_5_does_not_do(change):
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        read_config(qwen3_5("Qwen3_5ForConditionalGeneration", DENSE | change))


def test_unknown_fields_of_the_text_part_are_named():
    config = ConfigReader(qwen3_5("Qwen3_5ForConditionalGeneration", DENSE | {"mystery_noise": 0.1}), "config.json")
    read_fields(config)
    assert config.unknown == ["mystery_noise"]


@pytest.mark.parametrize("change", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [3]}, {"use_sliding_window": True}])
def test_what_qwen3_next_does_not_do(change):
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        read_config(QWEN3_NEXT | change)


def test_heads_and_taps_that_cannot_be(folder_with, gguf_with):
    with pytest.raises(MalformedFile, match="5 value heads of a delta net cannot share 2 key heads evenly"):
        open_checkpoint(folder_with("qwen35", config=lambda config: config.update(linear_num_value_heads=5)))
    with pytest.raises(UnsupportedModel, match="the convolution covers 17 positions"):
        open_checkpoint(gguf_with("qwen35", metadata=lambda metadata: metadata.update({"qwen35.ssm.conv_kernel": 17})))


def test_layers_can_be_named_one_by_one(gguf_with):
    kinds = {"qwen35.attention.recurrent_layers": [0, 1, 1]}
    path = gguf_with("qwen35", metadata=lambda metadata: metadata.update(kinds))
    assert open_checkpoint(path).spec.recurrent == {1, 2}


def test_tensors_of_what_sees_and_of_what_guesses_ahead_are_left_out(folder_with, floats):
    def other_names(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.")] = tensors.pop(name)
        tensors["model.visual.blocks.0.attn.proj.weight"] = tensors["mtp.layers.0.mlp.up_proj.weight"] = floats(4, 4)

    wanted = sorted(open_checkpoint(GOLDENS / "qwen35").tensors)
    assert sorted(open_checkpoint(folder_with("qwen35", tensors=other_names)).tensors) == wanted


def test_layers_of_a_file_that_guess_ahead_are_left_out(gguf_with, floats):
    def one_more(tensors: dict[str, Any]) -> None:
        tensors["blk.3.nextn.eh_proj.weight"] = tensors["blk.3.attn_q.weight"] = floats(4, 4)

    counts = {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1}
    path = gguf_with("qwen35", metadata=lambda metadata: metadata.update(counts), tensors=one_more)
    backend = RefBackend()
    backend.load(load_model(open_checkpoint(path), backend))

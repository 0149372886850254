"""LFM2 and Jamba, whose layers convolve over time: what published configs say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf.export import export
from penstock.model.load import load_model, open_checkpoint, read_fields
from penstock.model.recurrence import ConvSpec, MambaSpec, ScanSpec
from tests.models.config_json import read_config

GOLDENS = Path(__file__).parent / "goldens"
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
LFM2_5 = {  # 2.6B
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": False,
    "bos_token_id": 124894,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 124900,
    "hidden_size": 2048,
    "intermediate_size": 10752,
    "layer_types": ["conv", "conv", "full_attention"] * 10,
    "max_position_embeddings": 131072,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "pad_token_id": 124893,
    "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
    "tie_embedding": True,
    "tie_word_embeddings": True,
    "vocab_size": 128000,
}
LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
LFM2_VL = {
    "architectures": ["Lfm2VlForConditionalGeneration"],
    "do_image_splitting": True,
    "downsample_factor": 2,
    "encoder_patch_size": 16,
    "image_token_id": 396,
    "max_image_tokens": 256,
    "max_num_patches": 1024,
    "max_pixels_tolerance": 2.0,
    "max_tiles": 10,
    "min_image_tokens": 64,
    "min_tiles": 2,
    "model_type": "lfm2-vl",
    "projector_bias": True,
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 2560,
    "projector_use_layernorm": True,
    "text_config": LFM2,
    "tile_size": 512,
    "torch_dtype": "bfloat16",
    "use_image_special_tokens": True,
    "use_thumbnail": True,
    "vision_config": {"hidden_size": 1152, "model_type": "siglip2_vision_model"},
    "vision_feature_layer": -1,
}
JAMBA = {  # 1.5 Mini
    "architectures": ["JambaForCausalLM"],
    "attention_dropout": 0.0,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "bos_token_id": 1,
    "eos_token_id": [2, 518],
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "model_type": "jamba",
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mamba_kernels": True,
    "vocab_size": 65536,
}


def unknown_in(config: dict[str, Any]) -> list[str]:
    reader = ConfigReader(config, "config.json")
    read_fields(reader)
    return reader.unknown


@pytest.mark.parametrize("config", [LFM2, LFM2_5, LFM2_MOE, LFM2_VL, JAMBA], ids=lambda config: config["model_type"])
def test_every_field_of_published_configs_is_known(config):
    assert unknown_in(config) == []


def test_lfm2_has_convolutions_between_attention():
    spec = read_config(LFM2)
    assert (spec.attention_layers, spec.attn.qk_norm, spec.tied) == ((2, 5, 8, 10, 12, 14), "head", True)
    assert spec.recurrence == ConvSpec(2048, 3, gated=True)
    assert spec.state_bytes == 10 * 4 * 2 * 2048
    assert spec.hidden == 8192  # two thirds, a multiple of 256 already


@pytest.mark.parametrize(
    ("change", "hidden"),
    [
        ({}, 8192),
        ({"block_ffn_dim_multiplier": 1.3}, 10752),
        ({"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 1000}, 11000),
        ({"block_ffn_dim_multiplier": None, "block_ff_dim": 1000}, 666),
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({"block_ff_dim": None, "intermediate_size": 6656}, 4608),
        ({"intermediate_size": 6656}, 8192),  # block_ff_dim comes first
    ],
)
def test_the_width_of_lfm2s_mlp_follows_its_rules(change, hidden):
    assert read_config(LFM2 | change).hidden == hidden


def test_lfm2_5_names_each_layer():
    spec = read_config(LFM2_5)
    assert (len(spec.recurrent), len(spec.cached_attention), spec.hidden, spec.tied) == (20, 10, 10752, True)
    assert not read_config(LFM2_5 | {"tie_embedding": False}).tied


def test_lfm2_moe_selects_experts_by_sigmoids_and_a_bias():
    spec = read_config(LFM2_MOE)
    assert (spec.dense, spec.hidden, spec.experts.hidden) == ({0, 1}, 7168, 1792)
    e = spec.experts
    assert (e.count, e.top_k, e.scoring, e.renormalize, e.choice_bias) == (32, 4, "sigmoid", True, True)
    assert not read_config(LFM2_MOE | {"use_expert_bias": False}).experts.choice_bias


def test_of_lfm2_vl_the_text_part_is_read():
    assert read_config(LFM2_VL) == read_config(LFM2)


@pytest.mark.parametrize(
    "change",
    [
        {"block_use_swiglu": False},
        {"use_pos_enc": False},
        {"layer_types": ["conv", "full_attention"]},
        {"layer_types": ["sliding_attention"] * 16},
        {"sliding_window": 64, "layer_types": ["sliding_attention"] * 16},
    ],
)
def test_what_lfm2_does_not_do(change):
    with pytest.raises(UnsupportedModel, match=list(change)[-1]):
        read_config(LFM2 | change)


@pytest.mark.parametrize("config", [LFM2 | {"full_attn_idxs": []}, JAMBA | {"num_hidden_layers": 4}])
def test_a_model_without_attention_is_refused(config):
    with pytest.raises(UnsupportedModel, match="no layer of this model has attention"):
        read_config(config)


def test_jamba_has_attention_and_experts_every_few_layers():
    spec = read_config(JAMBA)
    assert spec.attention_layers == (4, 12, 20, 28)
    assert spec.dense == set(range(0, 32, 2))
    assert spec.attn.rope.inv_freq == ()
    assert spec.recurrence == MambaSpec(ConvSpec(8192, 4), ScanSpec(8192, 16), 256)
    assert spec.state_bytes == 28 * 4 * 8192 * (3 + 16)
    assert (spec.experts.scoring, spec.experts.renormalize) == ("softmax", False)
    assert read_config(JAMBA | {"mamba_dt_rank": "auto"}) == spec
    assert read_config(JAMBA | {"num_experts": 1}).experts is None


@pytest.mark.parametrize(
    "change", [{"sliding_window": 4096}, {"hidden_act": "gelu"}, {"attn_layer_offset": 8}, {"mamba_dt_rank": "some"}]
)
def test_what_jamba_does_not_do(change):
    with pytest.raises((UnsupportedModel, MalformedFile), match=next(iter(change))):
        read_config(JAMBA | change)


def test_a_convolution_without_a_state_is_refused(folder_with):
    with pytest.raises(UnsupportedModel, match="the convolution covers 1 position"):
        open_checkpoint(folder_with("lfm2", config=lambda config: config.update(conv_L_cache=1)))


def test_states_that_no_backend_computes_are_refused(folder_with, gguf_with):
    with pytest.raises(UnsupportedModel, match="the convolution covers 17 positions"):
        open_checkpoint(folder_with("lfm2", config=lambda config: config.update(conv_L_cache=17)))
    sizes = {"jamba.ssm.state_size": 1000}
    with pytest.raises(UnsupportedModel, match="has 1000 numbers; supported: at most 256"):
        open_checkpoint(gguf_with("jamba", metadata=lambda metadata: metadata.update(sizes)))


def test_each_layer_of_a_file_has_its_kv_heads(gguf_with):
    for heads in ([0, 1, 2, 1], [0, 1], [0, 0, 0, 0]):
        changed = {"lfm2.attention.head_count_kv": heads}
        path = gguf_with("lfm2", metadata=lambda metadata, changed=changed: metadata.update(changed))
        with pytest.raises(UnsupportedModel, match="0 or the same number for 4 layers"):
            open_checkpoint(path)


def test_a_bias_that_the_config_does_not_mention_is_refused(folder_with, floats):
    def biased(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.conv.conv.bias"] = floats(40)

    with pytest.raises(MalformedFile, match="not expected"):
        open_checkpoint(folder_with("lfm2", tensors=biased))


def test_biases_of_convolutions(folder_with, floats):
    def biased(tensors: dict[str, Any]) -> None:
        for layer in (0, 2):
            for part, width in (("in_proj", 120), ("conv", 40), ("out_proj", 40)):
                tensors[f"model.layers.{layer}.conv.{part}.bias"] = floats(width)

    folder = folder_with("lfm2", tensors=biased, config=lambda config: config.update(conv_bias=True))
    got = []
    for backend in (RefBackend(), CpuBackend(2, kv="f32")):
        backend.load(load_model(open_checkpoint(folder), backend))
        backend.reserve_kv(12, 4, 5)
        got.append(backend.logits(greedy_batch([Chunk(range(9), 0, range(3), 0)])))
    assert np.abs(got[0] - got[1]).max() < 1e-4


def test_the_text_part_of_lfm2_vl_computes_as_lfm2_does(folder_with, floats):
    def within(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config.update(LFM2_VL, text_config=text)

    def other_names(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.")] = tensors.pop(name)
        tensors["model.vision_tower.encoder.layers.0.mlp.fc1.weight"] = floats(4, 4)
        tensors["model.multi_modal_projector.linear_1.weight"] = floats(4, 4)

    backend = RefBackend()
    backend.load(load_model(open_checkpoint(folder_with("lfm2", config=within, tensors=other_names)), backend))
    backend.reserve_kv(12, 4, 5)
    with np.load(GOLDENS / "lfm2" / "expected.npz") as file:
        tokens, logits = file["tokens"].tolist(), file["logits"]
    got = backend.logits(greedy_batch([Chunk(tokens, 0, range(12), 0)]))
    assert np.abs(got - logits).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lfm2moe", {"norm_topk_prob": False}, "norm_topk_prob = false: llama.cpp always renormalizes"),
        ("lfm2moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor = 2.0"),
        ("lfm2moe", {"use_expert_bias": False}, "no place in this architecture"),
    ],
)
def test_what_files_have_no_words_for_is_refused(folder_with, name, change, message):
    folder = folder_with(name, config=lambda config: config.update(change))
    with pytest.raises((UnsupportedModel, MalformedFile), match=message):
        export(folder, "q8_0", lambda tensor, format: tensor)


def test_a_file_cannot_have_biases_of_convolutions(folder_with, floats):
    def biased(tensors: dict[str, Any]) -> None:
        for part, width in (("in_proj", 64), ("conv", 32), ("out_proj", 32)):
            for layer in (1, 2):
                tensors[f"model.layers.{layer}.conv.{part}.bias"] = floats(width + 32 * (part == "in_proj"))

    folder = folder_with("lfm2moe", tensors=biased, config=lambda config: config.update(conv_bias=True))
    with pytest.raises(UnsupportedModel, match=r"conv_bias = true: llama\.cpp reads other biases"):
        export(folder, "q8_0", lambda tensor, format: tensor)

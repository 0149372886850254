"""Gemma 3n and Gemma 4: what their published configs say, what is refused, and folders of models that see and hear."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.load import load_model, open_checkpoint, read_fields
from penstock.model.safetensors import read_safetensors
from penstock.model.spec import ModelSpec
from penstock.planning.roofline import model_costs
from penstock.types import blocks_for
from tests.models.config_json import read_config

GOLDENS = Path(__file__).parent / "goldens"
ALL = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "num_attention_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
}
SLIDING, FULL = "sliding_attention", "full_attention"
E4B = ALL | {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_lr_multiplier": 1.0,
    "altup_num_inputs": 4,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": [16384] * 35,
    "laurel_rank": 64,
    "layer_types": [*[SLIDING] * 4, FULL] * 7,
    "max_position_embeddings": 32768,
    "model_type": "gemma3n_text",
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
}
GEMMA_3N_E4B = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "audio_config": {"model_type": "gemma3n_audio"},
    "audio_soft_tokens_per_image": 188,
    "audio_token_id": 262273,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "eoa_token_id": 262272,
    "eoi_token_id": 262144,
    "eos_token_id": [1, 106],
    "image_token_id": 262145,
    "initializer_range": 0.02,
    "model_type": "gemma3n",
    "text_config": E4B,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.0",
    "vision_config": {"model_type": "gemma3n_vision"},
    "vision_soft_tokens_per_image": 256,
}
ROPES = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
}
E2B = ALL | {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "global_head_dim": 512,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": [*[SLIDING] * 4, FULL] * 7,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "rope_parameters": ROPES,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
LARGE = E2B | {
    "attention_k_eq_v": True,
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": [*[SLIDING] * 5, FULL] * 10,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
EXPERTS = LARGE | {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": [*[SLIDING] * 5, FULL] * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}


def gemma_4(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "eoa_token_index": 258883,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "video_token_id": 258884,
        "vision_config": {"model_type": "gemma4_vision"},
    }


def known(config: dict[str, Any]) -> ModelSpec:
    reader = ConfigReader(config, "config.json")
    spec = read_fields(reader)
    assert reader.unknown == []
    return spec


def test_gemma_3n_writes_the_keys_and_values_of_twenty_layers():
    spec = known(GEMMA_3N_E4B)
    assert (spec.layers, len(spec.cached_attention), spec.attn.multiplier, spec.gain_offset) == (35, 20, 1, 0)
    assert [spec.kv_layer(layer) for layer in (17, 18, 19, 20, 23, 24, 33, 34)] == [17, 18, 19, 18, 18, 19, 18, 19]
    assert sum(len(group.layers) for group in spec.kv_groups) == 20
    assert spec.altup
    assert spec.per_layer
    assert [spec.altup.cutoffs[layer] for layer in (9, 10)] == [pytest.approx(1.6448536), -inf]
    assert (spec.altup.streams, spec.per_layer.vocab, spec.vocab, spec.logit_cap) == (4, 262144, 262400, 30)


def test_gemma_3n_says_little_and_means_its_published_sizes():
    silent = ("activation_sparsity_pattern", "layer_types", "altup_num_inputs", "num_kv_shared_layers", "laurel_rank")
    assert known(GEMMA_3N_E4B | {"text_config": {k: v for k, v in E4B.items() if k not in silent}}) == known(
        GEMMA_3N_E4B
    )


def test_gemma_4_has_larger_heads_in_layers_that_see_everything():
    spec = known(gemma_4(E2B))
    near, far = spec.attention(0), spec.attention(4)
    assert (near.head_dim, near.window, far.head_dim, far.window, far.kv_heads) == (256, 512, 512, 0, 1)
    assert [sum(freq > 0 for freq in attn.rope.inv_freq) for attn in (near, far)] == [128, 64]
    assert far.rope.inv_freq[63] == pytest.approx(1e6 ** (-126 / 512))
    assert (spec.mlp_hidden(14), spec.mlp_hidden(15), spec.hidden) == (6144, 12288, 12288)
    assert (len(spec.cached_attention), spec.tied) == (15, True)


def test_smaller_layers_share_the_room_of_a_larger_one():
    """Two of E2B's layers with a window take as much as one without, so that no room is lost."""
    spec = known(gemma_4(E2B))
    assert [len(group.layers) for group in spec.kv_groups] == [3, 6, 6]
    assert len(spec.kv_planes) == 3
    whole = sum(attn.kv_values for attn in spec.cached_attention)
    assert spec.kv_group_bytes(2 * whole) * len(spec.kv_groups) == 2 * whole


def test_the_largest_gemma_4_projects_keys_and_values_by_one_matrix():
    spec = known(gemma_4(LARGE))
    near, far = spec.attention(0), spec.attention(5)
    assert (near.kv_heads, far.kv_heads, near.v_is_k, far.v_is_k) == (16, 4, False, True)
    assert spec.per_layer is None
    assert len(spec.cached_attention) == 60
    assert spec.kv_group_bytes(60) * len(spec.kv_groups) <= 66  # at most a tenth is lost
    held = blocks_for(32768, spec.windows, 16)
    assert held < len(spec.windows) * 32768 / 16


def test_gemma_4_has_experts_beside_its_mlp():
    spec = known(gemma_4(EXPERTS))
    assert spec.experts
    assert (spec.experts.count, spec.experts.top_k, spec.experts.hidden, spec.hidden) == (128, 8, 704, 2112)
    assert spec.experts.renormalize
    assert spec.experts.act == "gelu_tanh"


def test_sizes_of_each_layer_are_those_of_global_layers():
    """Transformers 5 writes them so."""
    each = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    saved = {key: value for key, value in LARGE.items() if not key.startswith(("global", "num_global"))}
    assert known(gemma_4(saved | {"per_layer_config": each})) == known(gemma_4(LARGE))
    with pytest.raises(UnsupportedModel, match="per_layer_config"):
        read_config(gemma_4(saved | {"per_layer_config": each | {"0": {"head_dim": 64}}}))


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (GEMMA_3N_E4B, {"altup_correct_scale": False}),
        (GEMMA_3N_E4B, {"altup_num_inputs": 9}),
        (GEMMA_3N_E4B, {"hidden_activation": "silu"}),
        (gemma_4(E2B), {"use_bidirectional_attention": "all"}),
        (gemma_4(E2B), {"rope_scaling": {"rope_type": "yarn"}}),
        (gemma_4(E2B), {"rope_parameters": {FULL: {"rope_type": "yarn"}}}),
    ],
)
def test_what_is_refused(config, change):
    name = "rope_type" if any(key.startswith("rope") for key in change) else next(iter(change))
    with pytest.raises(UnsupportedModel, match=name):
        read_config(config | {"text_config": config["text_config"] | change})


@pytest.mark.parametrize("count", [35, 34])
def test_layers_that_share_kv_need_one_of_their_kind_before_them(count):
    with pytest.raises(MalformedFile, match=f"last {count} of 35"):
        read_config(GEMMA_3N_E4B | {"text_config": E4B | {"num_kv_shared_layers": count}})


@pytest.mark.parametrize("golden", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("make", [RefBackend, lambda: CpuBackend(2, kv="f32")], ids=["ref", "cpu"])
def test_folders_of_models_that_see_and_hear(golden, make, folder_with, floats):
    """Their text part runs; towers are left out, and so are keys that shared layers have though nothing reads them."""
    family = {"gemma3n": "Gemma3n", "gemma4": "Gemma4"}[golden]

    def nested(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config |= {"architectures": [f"{family}ForConditionalGeneration"], "text_config": text}
        config |= {"vision_config": {}, "audio_config": {}, "image_token_id": 7, "tie_word_embeddings": True}

    def prefixed(tensors: dict[str, Any]) -> None:
        renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors |= renamed
        tensors["model.language_model.layers.5.self_attn.k_proj.weight"] = floats(4, 4)
        for tower in ("vision_tower.stem", "audio_tower.conv", "embed_vision.projection", "embed_audio.projection"):
            tensors[f"model.{tower}.weight"] = floats(4, 4)

    backend = make()
    backend.load(load_model(open_checkpoint(folder_with(golden, nested, prefixed), strict=True), backend))
    with np.load(GOLDENS / golden / "expected.npz") as file:
        tokens, logits = file["tokens"].tolist(), file["logits"]
    backend.reserve_kv(12, 4, 1)
    assert np.abs(backend.logits(greedy_batch([Chunk(tokens, 0, range(12))])) - logits).max() < 1e-4


def test_tokens_beyond_the_table_of_per_layer_embeddings_take_its_first_row(folder_with, tmp_path):
    """As transformers has it: the last tokens of Gemma 3n stand for images and audio."""

    def shorter(tensors: dict[str, Any]) -> None:
        name = "model.embed_tokens_per_layer.weight"
        table = tensors[name]
        row = table.size // table.shape[0]
        tensors[name] = replace(table, shape=(40, table.shape[1]), source=table.data[: 40 * row])

    def repeated(tensors: dict[str, Any]) -> None:
        name = "model.embed_tokens_per_layer.weight"
        rows = tensors[name].data.reshape(48, -1).copy()
        rows[40:] = rows[0]
        tensors[name] = replace(tensors[name], source=rows.reshape(-1))

    answers = []
    for edit, changes in ((shorter, {"vocab_size_per_layer_input": 40}), (repeated, {})):
        folder = folder_with("gemma3n", lambda config, changes=changes: config.update(changes), edit)
        for backend in (RefBackend(), CpuBackend(2, kv="f32")):
            backend.load(load_model(open_checkpoint(folder), backend))
            backend.reserve_kv(2, 4, 1)
            answers.append(backend.logits(greedy_batch([Chunk([3, 47, 40, 39, 0], 0, range(2))])))
        folder.rename(tmp_path / f"done {len(answers)}")
    assert max(np.abs(answer - answers[0]).max() for answer in answers) < 1e-4


def test_costs_count_what_shared_layers_read():
    checkpoint = open_checkpoint(GOLDENS / "gemma3n")
    costs = model_costs(checkpoint.spec, checkpoint.tensors, RefBackend().stored_as, kv_token=64)
    assert (costs.kv_token, len(costs.windows)) == (64 * 6 // 2, 6)
    table = read_safetensors(GOLDENS / "gemma3n" / "model.safetensors")["model.embed_tokens_per_layer.weight"]
    matrices = sum(group.weights for group in costs.weight_groups)
    counted = [t for name, t in checkpoint.tensors.items() if len(t.shape) == 2 and name != "per_layer_embed"]
    assert matrices == sum(t.shape[0] * t.shape[1] for t in counted)
    assert table.shape == (48, 36)


def test_a_file_without_the_factors_of_its_rope_is_refused(gguf_with):
    with pytest.raises(MalformedFile, match="rope_freqs"):
        open_checkpoint(gguf_with("gemma4", tensors=lambda tensors: tensors.pop("rope_freqs.weight")))


def test_configs_of_goldens_say_no_more_than_is_known():
    for name in ("gemma3n", "gemma3n_three", "gemma4", "gemma4_moe"):
        known(json.loads((GOLDENS / name / "config.json").read_text()))

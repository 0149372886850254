"""DeepSeek V3.2 and GLM-5: what their published configs say, what is refused, and what an index takes in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.backend.cpu import CpuBackend
from penstock.errors import UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.load import load_model, open_checkpoint, read_fields
from tests.models.config_json import read_config
from tests.models.test_latent_families import V3

GOLDENS = Path(__file__).parent / "goldens"
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "model_type": "deepseek_v32",
    "quantization_config": V3["quantization_config"] | {"scale_fmt": "ue8m0"},
    "transformers_version": "4.44.2",
}
del V32["auto_map"]
GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.2.dev0",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
TYPES = ["full" if layer < 3 or (layer - 2) % 4 == 0 else "shared" for layer in range(78)]
GLM_5_2 = GLM_5 | {
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": TYPES,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}


@pytest.mark.parametrize("config", [V32, GLM_5, GLM_5_2])
def test_every_field_of_a_published_config_is_known(config: dict[str, Any]) -> None:
    reader = ConfigReader(config, "config.json")
    read_fields(reader)
    assert not reader.unknown


def test_deepseek_v32() -> None:
    spec = read_config(V32)
    index = spec.attn.index
    assert index is not None
    assert (index.heads, index.head_dim, index.top_k, index.shared) == (64, 128, 2048, False)
    assert (len(index.rope.inv_freq), index.rope.interleaved, spec.attn.rope.interleaved) == (32, False, True)
    assert (spec.attn.head_dim, spec.attn.kv_values, len(spec.dense), spec.unused_layers) == (576, 704, 3, 1)


def test_glm_5() -> None:
    spec = read_config(GLM_5)
    index = spec.attn.index
    assert index is not None
    assert (index.heads, index.rope.interleaved, spec.layer_attn) == (32, True, ())
    assert (spec.attn.kv_values, sorted(spec.dense), spec.eps) == (704, [0, 1, 2], 1e-5)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"indexer_types": None},
        {"indexer_types": None, "index_topk_pattern": "".join(kind[0].upper() for kind in TYPES)},
    ],
)
def test_layers_of_glm_5_2_share_what_was_selected(said: dict[str, Any]) -> None:
    spec = read_config(GLM_5_2 | said)
    shared = [layer for layer in range(78) if spec.attention(layer).kv_values == 576]
    assert shared[:6] == [3, 4, 5, 7, 8, 9]
    assert sum(attn.kv_values for attn in spec.cached_attention) == 78 * 576 + 21 * 128


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (V32, {"q_lora_rank": None}, "q_lora_rank"),
        (V32, {"index_head_dim": 48}, "index_head_dim"),
        (V32, {"layer_types": ["full_attention"] * 61}, "layer_types"),
        (V32, {"rope_interleave": False}, "rope_interleave"),
        (V32, {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        (GLM_5, {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        (GLM_5, {"indexer_types": ["shared"] * 78}, "indexer_types"),
        (GLM_5, {"index_topk_pattern": "FS"}, "index_topk_pattern"),
        (V3, {"index_topk": 2048}, "index_topk"),
    ],
)
def test_what_is_computed_otherwise_is_refused(config: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_config(config | changes)


@pytest.mark.parametrize(("kv", "per_layer"), [("f16", 2 * 128), ("f32", 4 * 128), ("int8", 128 + 3 * 4)])
def test_a_token_leaves_its_latents_and_an_index_key(kv: str, per_layer: int) -> None:
    checkpoint = open_checkpoint(GOLDENS / "deepseek_v32")
    backend = CpuBackend(1, kv=kv)
    backend.load(load_model(checkpoint, backend))
    assert backend.memory_needs().kv_bytes_per_token == 2 * per_layer
    assert backend.footprint(checkpoint.spec, checkpoint.tensors.values()).kv_token == 2 * per_layer

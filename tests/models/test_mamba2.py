"""Models with Mamba2 layers: what published configs say, what files have besides, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf.export import export
from penstock.model.load import open_checkpoint, read_fields
from penstock.model.recurrence import Mamba2Spec
from penstock.model.spec import ModelSpec
from tests.models.config_json import read_config

GOLDENS = Path(__file__).parent / "goldens"
GRANITE_4_H_TINY = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 100352,
}
NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "initializer_range": 0.02,
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.4",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
FALCON_H1_1_5B = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "bos_token_id": 1,
    "embedding_multiplier": 5.656854249492381,
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": "auto",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "use_cache": True,
    "vocab_size": 65537,
}
BAMBA_9B = {
    "architectures": ["BambaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "bamba",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mamba_kernels": True,
    "vocab_size": 128256,
}
PUBLISHED = {"granite": GRANITE_4_H_TINY, "nemotron": NEMOTRON_3_NANO, "falcon": FALCON_H1_1_5B, "bamba": BAMBA_9B}


def mamba_of(spec: ModelSpec) -> Mamba2Spec:
    assert isinstance(spec.recurrence, Mamba2Spec)
    spec.recurrence.check()
    return spec.recurrence


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_every_field_of_published_configs_is_known(config: dict[str, Any]) -> None:
    reader = ConfigReader(config, "config.json")
    read_fields(reader)
    assert reader.unknown == []


def test_granite_4_has_experts_and_no_rope() -> None:
    spec = read_config(GRANITE_4_H_TINY)
    assert spec.attention_layers == (5, 15, 25, 35)
    assert len(spec.recurrent) == 36
    assert spec.attn.rope.inv_freq == ()
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.hidden, spec.shared_hidden) == (64, 512, 1024)
    assert mamba_of(spec) == Mamba2Spec(48, 64, 128, 1, 4, eps=1e-5)
    assert mamba_of(spec).eps != spec.eps  # the residual multiplier changes only the latter


def test_granite_4_without_mamba_is_an_ordinary_decoder() -> None:
    layers = {"layer_types": ["attention"] * 40, "position_embedding_type": "rope", "num_local_experts": 0}
    spec = read_config(GRANITE_4_H_TINY | layers)
    assert spec.recurrence is None
    assert spec.state_bytes == 0
    assert len(spec.cached_attention) == 40
    assert spec.attn.rope.inv_freq
    assert (spec.experts, spec.hidden) == (None, 1024)


def test_each_layer_of_nemotron_h_is_one_part() -> None:
    spec = read_config(NEMOTRON_3_NANO)
    assert (len(spec.recurrent), len(spec.attention_layers), spec.layers) == (23, 6, 52)
    assert not spec.recurrent & set(spec.attention_layers)
    assert len(spec.cached_attention) == 6
    assert spec.experts is not None
    assert not spec.experts.gated
    assert (spec.experts.scoring, spec.experts.scale, spec.act) == ("sigmoid", 2.5, "relu2")
    assert mamba_of(spec) == Mamba2Spec(64, 64, 128, 8, 4, eps=1e-5, norm_groups=8)


def test_every_layer_of_falcon_h1_has_both() -> None:
    spec = read_config(FALCON_H1_1_5B)
    assert spec.recurrent == set(spec.attention_layers) == set(range(24))
    assert spec.attn.multiplier == pytest.approx(128**-0.5 * 0.390625)
    mamba = mamba_of(spec)
    assert (mamba.inner, mamba.norm_groups, mamba.z_scale, mamba.dt_scale) == (
        3072,
        0,
        0.3535533905932738,
        0.3535533905932738,
    )
    assert spec.branch_scales is not None
    assert spec.branch_scales.convolved == (0.25, 0.3535533905932738, 0.5)


def test_bamba_rotates_half_of_each_head() -> None:
    spec = read_config(BAMBA_9B)
    assert spec.attention_layers == (9, 18, 27)
    assert len(spec.attn.rope.inv_freq) == 32
    assert mamba_of(spec) == Mamba2Spec(128, 64, 128, 1, 4, eps=1e-5)


@pytest.mark.parametrize("limit", [[0.01, 0.5], [0.01, {"__float__": "Infinity"}]])
def test_time_steps_have_limits(limit: list[Any]) -> None:
    mamba = mamba_of(read_config(GRANITE_4_H_TINY | {"time_step_limit": limit}))
    assert mamba.dt_min == 0.01
    assert mamba.dt_max == (0.5 if limit[1] == 0.5 else float("inf"))


@pytest.mark.parametrize(
    ("config", "change", "error"),
    [
        (GRANITE_4_H_TINY, {"mamba_n_heads": 40}, "mamba_n_heads = 40"),
        (GRANITE_4_H_TINY, {"layer_types": ["mamba"] * 40}, "layer_types = 'no attention'"),
        (GRANITE_4_H_TINY, {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        (GRANITE_4_H_TINY, {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        (NEMOTRON_3_NANO, {"hybrid_override_pattern": "M?*"}, "hybrid_override_pattern = 'M\\?\\*'"),
        (NEMOTRON_3_NANO, {"hybrid_override_pattern": "MEME", "num_hidden_layers": 4}, "without attention"),
        (NEMOTRON_3_NANO, {"mlp_bias": True}, "mlp_bias = True"),
        (NEMOTRON_3_NANO, {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'"),
        (NEMOTRON_3_NANO, {"sliding_window": 512}, "sliding_window = 512"),
        (FALCON_H1_1_5B, {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate = True"),
        (FALCON_H1_1_5B, {"projectors_bias": True}, "projectors_bias = True"),
        (BAMBA_9B, {"attn_layer_indices": [32]}, "attn_layer_indices"),
        (BAMBA_9B, {"attn_rotary_emb": 128}, "attn_rotary_emb = 128"),
    ],
)
def test_what_is_refused(config: dict[str, Any], change: dict[str, Any], error: str) -> None:
    with pytest.raises((UnsupportedModel, MalformedFile), match=error):
        read_config(config | change)


@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"])
def test_folders_cannot_be_written_as_gguf_yet(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be written as GGUF yet"):
        export(GOLDENS / name, "q8_0", lambda tensor, format: tensor)


@pytest.mark.parametrize("name", ["granitemoehybrid", "nemotron_h", "falcon_h1_norm"])
def test_files_describe_the_same_states_as_folders(name: str) -> None:
    folder, file = (open_checkpoint(GOLDENS / name / part).spec for part in ("", "model.gguf"))
    assert folder.state_bytes == file.state_bytes > 0
    assert (folder.recurrent, folder.attention_layers) == (file.recurrent, file.attention_layers)
    assert mamba_of(folder).state_floats == mamba_of(file).state_floats

"""Makes those of tests/models/goldens that have Mamba2 layers, in the way and with the needs of make_goldens.py:

python scripts/make_mamba2_goldens.py [NAME ...]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from make_goldens import PLAIN, Recipe, chosen, fading, filled, interleaved, make, named, new_model, stored, write_out
from transformers import PreTrainedConfig, PreTrainedModel

LINEAR, FULL = "linear_attention", "full_attention"
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
MAMBA = {
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
}
GRANITE = MAMBA | {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.4,
    "rms_norm_eps": 1e-5,
}
NEMOTRON = {
    "conv_kernel": 3,
    "head_dim": 12,
    "intermediate_size": 40,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 8,
    "mamba_num_heads": 6,
    "n_groups": 2,
    "ssm_state_size": 10,
    "time_step_min": 1e-9,  # below it, transformers clamps time steps of prompts, and llama.cpp does not
}
FALCON = MAMBA | {
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "head_dim": 12,
    "intermediate_size": 24,
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.4,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 3,
    "mlp_multipliers": [0.8, 0.5],
    "rms_norm_eps": 1e-5,
    "rope_parameters": PLAIN | {"rope_theta": 1000.0},
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.9, 0.7, 1.2, 0.8, 1.1],
    "ssm_out_multiplier": 0.6,
}
GOLDENS: dict[str, tuple[str, dict[str, Any]]] = {  # the model type, and its sizes
    "granitemoehybrid": (
        "granitemoehybrid",
        GRANITE
        | {
            "intermediate_size": 12,
            "layer_types": [LINEAR, FULL, LINEAR],
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "num_local_experts": 5,
            "shared_intermediate_size": 20,
            "tie_word_embeddings": True,
        },
    ),
    "granitehybrid_dense": (
        "granitemoehybrid",
        GRANITE
        | {
            "intermediate_size": 24,
            "layer_types": [FULL, LINEAR],
            "mamba_d_conv": 3,
            "mamba_d_head": 8,
            "mamba_n_heads": 8,
            "num_experts_per_tok": 0,
            "num_hidden_layers": 2,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "rope_parameters": PLAIN | {"rope_theta": 1000.0},
            "shared_intermediate_size": 24,
        },
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON | {"layers_block_type": [LINEAR, "mlp", FULL, LINEAR, "mlp"]}),
    "nemotron_h_moe": (
        "nemotron_h",
        NEMOTRON
        | {
            "layers_block_type": [LINEAR, "moe", FULL, LINEAR],
            "moe_intermediate_size": 12,
            "moe_latent_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "n_groups": 1,
            "n_routed_experts": 4,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "falcon_h1": ("falcon_h1", FALCON | {"num_hidden_layers": 2}),
    "falcon_h1_norm": (
        "falcon_h1",
        FALCON
        | {
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_n_heads": 6,
            "mamba_norm_before_gate": False,
            "mamba_rms_norm": True,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "lm_head_multiplier": 1.0,  # files that are tied can have no multipliers of these two
            "embedding_multiplier": 1.0,
        },
    ),
    "bamba": (
        "bamba",
        MAMBA
        | {
            "attn_layer_indices": [1],
            "head_dim": 8,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-5,
            "rope_parameters": PLAIN | {"rope_theta": 100.0},
        },
    ),
}
ARCHITECTURES = {
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
}
PLAIN_PARTS = {"ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "ffn_gate_inp"}  # what stays float32
INTERLEAVED = ("granitehybrid",)  # architectures whose files have q and k turned

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.norm.weight": "ssm_norm.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "pre_ff_layernorm.weight": "ffn_norm.weight",
    "feed_forward.gate_proj.weight": "ffn_gate.weight",
    "feed_forward.up_proj.weight": "ffn_up.weight",
    "feed_forward.down_proj.weight": "ffn_down.weight",
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
    "norm.weight": "attn_norm.weight",
    "mixer.q_proj.weight": "attn_q.weight",
    "mixer.k_proj.weight": "attn_k.weight",
    "mixer.v_proj.weight": "attn_v.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
}
GGUF_NAMES |= {  # as Nemotron-H calls them
    part.replace("mamba.", "mixer."): own for part, own in GGUF_NAMES.items() if part.startswith("mamba.")
}


def main() -> None:
    for name in chosen(GOLDENS):
        make(name, Recipe({}, random_model=random_model, write_gguf=write_gguf))


def random_model(name: str, seed: int) -> PreTrainedModel:
    kind, sizes = GOLDENS[name]
    model = new_model(kind, SIZES | sizes, seed)
    return filled(model, stored(model), middle)


def middle(key: str, weight: torch.Tensor) -> float:
    return 1 if key.endswith(".D") else fading(key, weight)


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    config = model.config
    moe = "moe" in getattr(config, "layers_block_type", ())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type] + "_moe" * moe)
    add_keys(writer, config)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for own, values in converted(name, weight.numpy(), writer.arch, config):
            plain = values.ndim == 1 or writer.arch == "falcon-h1" or PLAIN_PARTS.intersection(own.split("."))
            writer.add_tensor(own, values.astype(np.float32 if plain else np.float16))
    write_out(writer)


def converted(name: str, values: np.ndarray, arch: str, config: PreTrainedConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors that a GGUF file has for one of a folder."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith(("A_log", ".D")):
        values = (-np.exp(values) if name.endswith("A_log") else values)[:, None]
    elif "conv1d.weight" in name:
        values = values.squeeze(1)
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        values = values.reshape(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
    elif arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        values = turned(values, config)
    if config.model_type == "falcon_h1":
        values = values * multiplier(name, config)
    if name.endswith(("experts.gate_up_proj", "shared_mlp.input_linear.weight")):
        gate, up = np.split(values, 2, axis=-2)
        kind = "_exps" if ".experts." in name else "_shexp" if config.num_local_experts else ""
        yield f"{layer}.ffn_gate{kind}.weight", gate
        yield f"{layer}.ffn_up{kind}.weight", up
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"{layer}.ffn_down{'_shexp' if config.num_local_experts else ''}.weight", values
    elif arch == "falcon-h1" and name.endswith("pre_ff_layernorm.weight"):
        yield f"{layer}.ffn_norm", values  # llama.cpp reads it by this name
    else:
        yield named(name, GGUF_NAMES), values


def turned(values: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    """Returns q or k with those dimensions of each head interleaved that RoPE rotates."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1))
    heads = values.reshape(-1, head_dim, values.shape[1])
    both = [interleaved(heads[:, :rotated].reshape(-1, values.shape[1]), rotated), heads[:, rotated:]]
    return np.concatenate([part.reshape(len(heads), -1, values.shape[1]) for part in both], axis=1).reshape(
        values.shape
    )


def multiplier(name: str, config: PreTrainedConfig) -> Any:
    """Returns what llama.cpp's converter multiplies a tensor of Falcon-H1 by."""
    inner, bc = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    ssm = np.repeat(config.ssm_multipliers, (inner, inner, bc, bc, config.mamba_n_heads))[:, None]
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier * ssm,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return next((factor for part, factor in factors.items() if f".{part}." in f".{name}"), 1.0)


def add_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_name(f"tiny {config.model_type}")
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if writer.arch == "granitehybrid":
        add_granite_keys(writer, config)
    elif writer.arch == "falcon-h1":
        add_falcon_keys(writer, config)
    else:
        add_nemotron_keys(writer, config)


def add_falcon_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_ssm_keys(writer, config)


def add_granite_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = getattr(config, "position_embedding_type", "rope") == "rope"
    kinds = config.layers_block_type
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv([config.num_key_value_heads * (kind == FULL) for kind in kinds])
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_scaling_finetuned(rope)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_ssm_keys(writer, config)
    if config.model_type == "bamba":
        return
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def add_nemotron_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    kinds, moe = config.layers_block_type, writer.arch.endswith("moe")
    hidden = config.moe_intermediate_size if moe else config.intermediate_size
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length([hidden * (kind in ("mlp", "moe")) for kind in kinds])
    writer.add_head_count_kv([config.num_key_value_heads * (kind == FULL) for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(False)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    if moe:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_uint32(f"{writer.arch}.moe_latent_size", config.moe_latent_size)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)


def add_ssm_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


if __name__ == "__main__":
    main()

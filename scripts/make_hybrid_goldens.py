"""Makes the goldens of hybrid models, as make_goldens.py does those of the others.

python scripts/make_hybrid_goldens.py [NAME ...]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from make_goldens import PLAIN, Recipe, chosen, fading, filled, make, named, new_model, write_out
from transformers import PreTrainedConfig, PreTrainedModel


def layers(count: int) -> dict[str, Any]:
    return {"num_hidden_layers": count, "layer_types": ["linear_attention"] * (count - 1) + ["full_attention"]}


SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": True,
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
GOLDENS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3next": ("qwen3_next", SIZES | EXPERTS | layers(2) | {"intermediate_size": 48}),
    "qwen35": ("qwen3_5_text", SIZES | layers(3) | {"intermediate_size": 16}),
    "qwen35moe": ("qwen3_5_moe_text", SIZES | EXPERTS | layers(2)),
}

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_proj": "ffn_gate_exps.weight",
    "mlp.experts.up_proj": "ffn_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
}


def main() -> None:
    for name in chosen(GOLDENS):
        make(name, Recipe({}, random_model=random_model, write_gguf=partial(write_gguf, name)))


def random_model(name: str, seed: int) -> PreTrainedModel:
    model = new_model(*GOLDENS[name], seed)
    return filled(model, model.named_parameters(), middle)


def middle(key: str, weight: torch.Tensor) -> float:
    """Returns the middle of gains, which are less one but for those of delta nets, and of other weights."""
    return 0 if "norm" in key and not key.endswith("linear_attn.norm.weight") else fading(key, weight)


def write_gguf(arch: str, path: Path, model: PreTrainedModel) -> None:
    writer = gguf.GGUFWriter(path, arch)
    add_keys(writer, model.config)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            for part, values in converted(arch, name, weight.numpy(), model.config):
                plain = values.ndim == 1 or "conv1d" in part
                writer.add_tensor(named(part, GGUF_NAMES), values.astype(np.float32 if plain else np.float16))
    write_out(writer)


def converted(arch: str, name: str, values: np.ndarray, config: PreTrainedConfig) -> Iterator[tuple[str, np.ndarray]]:
    """What files have in another order or form."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    if "norm" in name and "linear_attn" not in name:
        values = values + 1
    if "conv1d" in name:
        values = values.squeeze(1)
    if "linear_attn" in name and arch != "qwen3next":
        values = tiled(name, values, config)
    if "in_proj_qkvz" in name:
        k_dim, shared = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
        ends = np.cumsum([k_dim, k_dim, shared * config.linear_value_head_dim])
        groups = np.split(values.reshape(config.linear_num_key_heads, -1, values.shape[1]), ends, axis=1)
        q, k, v, z = (group.reshape(-1, values.shape[1]) for group in groups)
        yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
        yield name.replace("qkvz", "z"), z
    elif name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        yield name.replace("gate_up", "gate"), gate
        yield name.replace("gate_up", "up"), up
    elif "shared_expert_gate" in name:
        yield name, values[0]
    else:
        yield name, values


def tiled(name: str, values: np.ndarray, config: PreTrainedConfig) -> np.ndarray:
    """Value heads in an order in which those of one key head are as far apart as there are key heads."""
    heads, k_heads, size = config.linear_num_value_heads, config.linear_num_key_heads, config.linear_value_head_dim
    order = np.arange(heads).reshape(k_heads, -1).T.ravel()
    rows = (order[:, None] * size + np.arange(size)).ravel()
    keys = 2 * k_heads * config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([values[:keys], values[keys:][rows]])
    if "in_proj_z" in name:
        return values[rows]
    if "out_proj" in name:
        return values[:, rows]
    return values if "norm" in name else values[order]


def add_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_name(f"tiny {config.model_type}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if writer.arch != "qwen35moe":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([1, 1, 0, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    if writer.arch != "qwen35":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


if __name__ == "__main__":
    main()

"""Makes the goldens of LFM2 and Jamba, whose layers convolve over time, as make_goldens.py does those of the others.

python scripts/make_conv_goldens.py [NAME ...]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from make_goldens import PLAIN, Recipe, chosen, fading, filled, make, named, new_model, stored, write_out
from transformers import PreTrainedConfig, PreTrainedModel

SIZES = {"vocab_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
GOLDENS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        SIZES
        | {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "intermediate_size": 44,
            "block_multiple_of": 12,
            "block_ffn_dim_multiplier": 1.1,
            "tie_word_embeddings": True,
            "rope_parameters": PLAIN,
        },
    ),
    "lfm2moe": (
        "lfm2_moe",
        SIZES
        | {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_L_cache": 4,
            "intermediate_size": 24,
            "moe_intermediate_size": 8,
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
            "rope_parameters": PLAIN,
        },
    ),
    "jamba": (
        "jamba",
        SIZES
        | {
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "intermediate_size": 16,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 3,
            "tie_word_embeddings": False,
        },
    ),
}

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "model.final_layernorm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "pre_ff_layernorm.weight": "ffn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.x_proj.weight": "ssm_x.weight",
    "mamba.dt_proj.weight": "ssm_dt.weight",
    "mamba.dt_proj.bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_layernorm.weight": "ssm_dt_norm.weight",
    "mamba.b_layernorm.weight": "ssm_b_norm.weight",
    "mamba.c_layernorm.weight": "ssm_c_norm.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
    "feed_forward.gate_proj.weight": "ffn_gate.weight",
    "feed_forward.up_proj.weight": "ffn_up.weight",
    "feed_forward.down_proj.weight": "ffn_down.weight",
    "feed_forward.router.weight": "ffn_gate_inp.weight",
    "feed_forward.experts.gate_proj": "ffn_gate_exps.weight",
    "feed_forward.experts.up_proj": "ffn_up_exps.weight",
    "feed_forward.experts.down_proj": "ffn_down_exps.weight",
}


def main() -> None:
    for name in chosen(GOLDENS):
        make(name, Recipe({}, random_model=random_model, write_gguf=partial(write_gguf, name)))


def random_model(name: str, seed: int) -> PreTrainedModel:
    model = new_model(*GOLDENS[name], seed)
    return filled(model, stored(model), fading)


def write_gguf(arch: str, path: Path, model: PreTrainedModel) -> None:
    writer = gguf.GGUFWriter(path, arch)
    add_keys(writer, model.config)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for part, values in converted(name, weight.numpy()):
            plain = values.ndim == 1 or re.search(r"conv1d|conv\.conv|A_log|router|mlp\.gate|feed_forward\.gate", part)
            writer.add_tensor(named(part, GGUF_NAMES), values.astype(np.float32 if plain else np.float16))
    write_out(writer)


def converted(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields what files have in another form."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        values = values.squeeze(1)
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        yield name.replace("gate_up", "gate"), gate
        yield name.replace("gate_up", "up"), up
    else:
        yield name, values


def add_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_name(f"tiny {config.model_type}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    attentive = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads if one else 0 for one in attentive])
    (add_jamba_keys if writer.arch == "jamba" else add_lfm2_keys)(writer, config)


def add_jamba_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def add_lfm2_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    hidden = config.intermediate_size
    if writer.arch == "lfm2":
        scaled = int(config.block_ffn_dim_multiplier * int(2 * hidden / 3))
        hidden = -(-scaled // config.block_multiple_of) * config.block_multiple_of
    else:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_feed_forward_length(hidden)


if __name__ == "__main__":
    main()

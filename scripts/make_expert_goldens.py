"""Makes those of tests/models/goldens that have experts, in the way and with the needs of make_goldens.py:

python scripts/make_expert_goldens.py [NAME ...]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import make_goldens
import numpy as np
import torch
from make_goldens import (
    ORIGINAL,
    PLAIN,
    SMALLER,
    Recipe,
    add_keys,
    chosen,
    gguf_name,
    head_dim_of,
    interleaved,
    make,
    write_out,
)
from transformers import PreTrainedConfig, PreTrainedModel

EIGHT = SMALLER | {"head_dim": 8, "rope_parameters": PLAIN}
MULTIPLIED = SMALLER | {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.4,
    "rope_parameters": PLAIN,
}
GOLDENS: dict[str, dict[str, Any]] = {
    "mixtral": EIGHT | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    "qwen3_moe": EIGHT
    | {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "glm4_moe": EIGHT
    | {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "n_group": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "minimax_m2": EIGHT
    | {
        "bos_token_id": None,
        "eos_token_id": None,
        "intermediate_size": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 6,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
    },
    "qwen2_moe": SMALLER
    | {
        "intermediate_size": 20,
        "moe_intermediate_size": 12,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 1,
        "rope_parameters": PLAIN | {"rope_theta": 1000000.0},
        "shared_expert_intermediate_size": 20,
    },
    "olmoe": SMALLER
    | {
        "intermediate_size": 12,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": PLAIN,
    },
    "granitemoe": MULTIPLIED | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 12},
    "granitemoeshared": MULTIPLIED
    | {
        "intermediate_size": 8,
        "num_experts_per_tok": 3,
        "num_local_experts": 4,
        "shared_intermediate_size": 20,
        "tie_word_embeddings": True,
    },
    "ernie4_5": EIGHT
    | {
        "head_dim": 12,
        "num_key_value_heads": 1,
        "rope_parameters": PLAIN | {"rope_theta": 500.0},
        "tie_word_embeddings": False,
    },
    "ernie4_5_moe": SMALLER
    | {
        "intermediate_size": 32,
        "moe_intermediate_size": 8,
        "moe_k": 2,
        "moe_layer_interval": 2,
        "moe_layer_start_index": 1,
        "moe_num_experts": 6,
        "moe_num_shared_experts": 2,
        "num_hidden_layers": 3,
        "rope_parameters": PLAIN,
        "tie_word_embeddings": True,
    },
    "solar_open": EIGHT
    | {
        "head_dim": 12,
        "intermediate_size": 16,
        "moe_intermediate_size": 12,
        "n_group": 2,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 1,
        "rope_parameters": PLAIN
        | {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 4.0,
        },
        "routed_scaling_factor": 1.5,
        "topk_group": 1,
    },
    "hunyuan_v1_moe": EIGHT
    | {
        "head_dim": 12,
        "intermediate_size": 16,
        "moe_topk": 2,
        "num_experts": 5,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 5.0, "factor": 1.0},
    },
    "dots1": EIGHT
    | {
        "first_k_dense_replace": 1,
        "head_dim": 12,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "n_group": 2,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "sliding_window": None,
        "topk_group": 1,
    },
}
WITHOUT: dict[str, dict[str, Any]] = {  # see Recipe
    "mixtral": {"num_experts_per_tok": 1},
    "qwen3_moe": {"norm_topk_prob": False},
    "glm4_moe": {"n_group": 1},
    "minimax_m2": {"rope_parameters": PLAIN},
    "qwen2_moe": {"norm_topk_prob": True},
    "olmoe": {"norm_topk_prob": True},
    "granitemoe": {"residual_multiplier": 0.5},
    "granitemoeshared": {"attention_multiplier": 0.35},
    "ernie4_5": {"rope_parameters": PLAIN},
    "ernie4_5_moe": {"moe_k": 1},
    "dots1": {"n_group": 1},
    "hunyuan_v1_moe": {"rope_parameters": PLAIN | {"rope_theta": 100.0}},
    "solar_open": {"rope_parameters": PLAIN | {"rope_theta": 100.0}},
}
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "dots1": "dots1",
    "hunyuan_v1_moe": "hunyuan-moe",
    "solar_open": "glm4moe",
}
SILENT = ("llama", "olmoe", "granitemoe")  # those whose files say nothing of the width of an expert
INTERLEAVED = ("llama", "granitemoe")  # architectures whose files have q and k turned
GGUF_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
OTHER_NAMES = {"glm4moe": {"post_attention_layernorm": "post_attention_norm"}}


def main() -> None:
    make_goldens.GOLDENS |= GOLDENS
    make_goldens.MODEL_TYPES |= {name: name for name in GOLDENS}
    make_goldens.ARCHITECTURES |= ARCHITECTURES
    make_goldens.GGUF_NAMES |= GGUF_NAMES
    make_goldens.OTHER_NAMES |= OTHER_NAMES
    for name in chosen(GOLDENS):
        make(name, Recipe(WITHOUT, random_model=random_model, write_gguf=write_gguf))


def random_model(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    model = make_goldens.random_model(name, seed, **changes)
    generator = torch.Generator().manual_seed(seed)
    for key, value in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            value.copy_((torch.randn(value.shape, generator=generator) * 0.2).bfloat16().half())
    return model


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    config = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    add_keys(writer, config)
    add_expert_keys(writer, config)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if writer.arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, head_dim_of(config))
        for own, part in parts_of(name, values, writer.arch):
            plain = part.ndim == 1 or "ffn_gate_inp" in own
            writer.add_tensor(own, part.astype(np.float32 if plain else np.float16))
    if config.model_type == "glm4_moe":
        layer = f"blk.{config.num_hidden_layers}"  # what guesses the token after the next
        writer.add_tensor(f"{layer}.nextn.eh_proj.weight", np.zeros((2, 4), np.float16))
        writer.add_tensor(f"{layer}.attn_norm.weight", np.zeros(2, np.float32))
    write_out(writer)


def parts_of(name: str, values: np.ndarray, arch: str) -> list[tuple[str, np.ndarray]]:
    """One for each tensor that a GGUF file has for it."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith((".experts.gate_up_proj", "shared_mlp.input_linear.weight")):
        gate, up = np.split(values, 2, axis=-2)
        kind = "exps" if ".experts." in name else "shexp"
        return [(f"{layer}.ffn_gate_{kind}.weight", gate), (f"{layer}.ffn_up_{kind}.weight", up)]
    if name.endswith(".experts.down_proj"):
        return [(f"{layer}.ffn_down_exps.weight", values)]
    if name.endswith("e_score_correction_bias"):
        return [(f"{layer}.exp_probs_b.bias", values.reshape(-1))]
    return [(gguf_name(name, arch), values)]


def add_expert_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    if writer.arch == "ernie4_5":
        return
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if writer.arch not in SILENT:
        hidden = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(hidden)
    if shared := shared_size(config):
        writer.add_expert_shared_feed_forward_length(shared)
    if writer.arch == "dots1":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type == "glm4_moe":
        writer.add_uint32("glm4moe.block_count", config.num_hidden_layers + config.num_nextn_predict_layers)
        writer.add_nextn_predict_layers(config.num_nextn_predict_layers)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if writer.arch == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
    if writer.arch == "hunyuan-moe":
        alpha, dims = config.rope_parameters["alpha"], config.head_dim
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"] * alpha ** (dims / (dims - 2)))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_expert_shared_count(1)
    if writer.arch == "granitemoe":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if writer.arch in ("glm4moe", "minimax-m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if writer.arch == "glm4moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def shared_size(config: PreTrainedConfig) -> int:
    """The width of the shared expert, where its files say it; ERNIE's converter computes it in this way."""
    if config.model_type == "ernie4_5_moe":
        return config.intermediate_size // config.num_key_value_heads
    if config.model_type == "hunyuan_v1_moe":
        return config.intermediate_size
    keys = ("shared_expert_intermediate_size", "shared_intermediate_size")
    return next((size for key in keys if (size := getattr(config, key, 0))), 0)


if __name__ == "__main__":
    main()

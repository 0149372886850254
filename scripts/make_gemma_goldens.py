"""Makes those of tests/models/goldens that are Gemma 3n and Gemma 4, in the way and with the needs of make_goldens.py:

python scripts/make_gemma_goldens.py [NAME ...]
"""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import torch
from make_goldens import GGUF_NAMES, Recipe, chosen, filled, make, new_model, write_out
from transformers import PretrainedConfig, PreTrainedModel

WINDOWED, FULL = "sliding_attention", "full_attention"
GEMMA = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 7,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "final_logit_softcapping": 5.0,
    "vocab_size_per_layer_input": 48,
    "hidden_size_per_layer_input": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 1000.0},
    WINDOWED: {"rope_type": "default", "rope_theta": 100.0},
}
PROPORTIONAL = ROPES | {FULL: {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
GOLDENS: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "num_hidden_layers": 6,
        "intermediate_size": [16, 48, 16, 32, 16, 16],
        "layer_types": [WINDOWED, FULL, FULL, WINDOWED, WINDOWED, FULL],
        "num_kv_shared_layers": 4,
        "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.3, 0.0],
        "laurel_rank": 5,
        "rope_parameters": ROPES,
    },
    "gemma3n_three": {  # streams, of which the second one is computed
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "layer_types": [FULL, WINDOWED, WINDOWED, FULL],
        "num_kv_shared_layers": 1,
        "altup_num_inputs": 3,
        "altup_active_idx": 1,
        "laurel_rank": 8,
        "tie_word_embeddings": False,
        "hidden_size": 36,
        "rope_parameters": ROPES,
    },
    "gemma4": {
        "num_hidden_layers": 6,
        "intermediate_size": 16,
        "use_double_wide_mlp": True,
        "layer_types": [WINDOWED, FULL, WINDOWED, WINDOWED, WINDOWED, FULL],
        "num_kv_shared_layers": 3,
        "global_head_dim": 16,
        "rope_parameters": PROPORTIONAL,
    },
    "gemma4_moe": {
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "layer_types": [FULL, WINDOWED, WINDOWED, FULL],
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "global_head_dim": 12,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
        "tie_word_embeddings": False,
        "rope_parameters": PROPORTIONAL,
    },
}
WITHOUT: dict[str, dict[str, Any]] = {  # see Recipe
    "gemma3n": {"activation_sparsity_pattern": [0.0] * 6},
    "gemma3n_three": {"altup_active_idx": 0},
    "gemma4": {"rope_parameters": ROPES},
    "gemma4_moe": {"layer_types": [WINDOWED, WINDOWED, WINDOWED, FULL], "attention_k_eq_v": False},
}
NAMES = GGUF_NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "model.altup_projections": "altup_proj",
    "model.altup_unembed_projections": "altup_unembd_proj",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.correct_output_scale": "altup_correct_scale",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "layer_scalar": "layer_output_scale",
    "router.proj": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}


def main() -> None:
    recipe = Recipe(WITHOUT, least=0.1, random_model=random_model, write_gguf=write_gguf)
    for name in chosen(GOLDENS):
        make(name, recipe)


def random_model(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    model = new_model(f"{name.split('_')[0]}_text", GEMMA | GOLDENS[name] | changes, seed)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else ()
    return filled(model, (pair for pair in model.state_dict().items() if pair[0] not in tied), middle)


def middle(key: str, weight: torch.Tensor) -> float:
    if "q_norm" in key:
        return 0.4  # scores are not divided by anything: sharper ones would make noise of rounding errors
    return 1 if "norm" in key or weight.ndim == 1 else 0


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type.removesuffix("_text"))
    add_keys(writer, config)
    for name, weight in gguf_weights(model).items():
        writer.add_tensor(name, weight.numpy().astype(np.float32 if weight.ndim == 1 else np.float16))
    write_out(writer)


def gguf_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As llama.cpp's files have them: the projections of all streams in one tensor, and a per-layer table with a row
    for every token."""
    weights = model.state_dict()
    for stem in ("model.altup_projections", "model.altup_unembed_projections"):
        if some := sorted(name for name in weights if name.startswith(f"{stem}.")):
            weights[f"{stem}.weight"] = torch.stack([weights.pop(name) for name in some])
    if (table := weights.get("model.embed_tokens_per_layer.weight")) is not None:
        more = model.config.vocab_size - len(table)
        weights["model.embed_tokens_per_layer.weight"] = torch.nn.functional.pad(table, (0, 0, 0, more))
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return {gguf_name(name): weight for name, weight in weights.items()}


def gguf_name(name: str) -> str:
    for theirs, ours in (("router.scale", "ffn_gate_inp.scale"), ("router.per_expert_scale", "ffn_down_exps.scale")):
        if name.endswith(theirs):
            return f"blk.{name.split('.')[2]}.{ours}"
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def add_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_name(f"tiny {config.model_type}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters[FULL]["rope_theta"])
    writer.add_float32(f"{writer.arch}.rope.freq_base_swa", config.rope_parameters[WINDOWED]["rope_theta"])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == WINDOWED for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if writer.arch == "gemma4":
        add_gemma4(writer, config)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        cutoffs = [NormalDist().inv_cdf(one) if one else -np.inf for one in config.activation_sparsity_pattern]
        writer.add_activation_sparsity_scale(cutoffs)


def add_gemma4(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    near, far = (config.per_layer_config[config.layer_types.index(kind)] for kind in (WINDOWED, FULL))
    shared = config.num_kv_shared_layers if config.use_double_wide_mlp else 0
    hidden = config.intermediate_size
    writer.add_feed_forward_length([hidden] * (config.num_hidden_layers - shared) + [2 * hidden] * shared)
    heads = {WINDOWED: near.num_key_value_heads, FULL: far.num_key_value_heads}
    writer.add_head_count_kv([heads[kind] for kind in config.layer_types])
    writer.add_key_length(far.head_dim)
    writer.add_value_length(far.head_dim)
    writer.add_key_length_swa(near.head_dim)
    writer.add_value_length_swa(near.head_dim)
    writer.add_rope_dimension_count(far.head_dim)
    writer.add_rope_dimension_count_swa(near.head_dim)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rotated = int(config.rope_parameters[FULL]["partial_rotary_factor"] * far.head_dim // 2)
    factors = np.where(np.arange(far.head_dim // 2) < rotated, 1.0, 1e30)
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


if __name__ == "__main__":
    main()

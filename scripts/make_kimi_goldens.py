"""Makes the golden of Kimi-Linear, as make_goldens.py does those of others, and tests/models/folders/kimi_linear, whose
delta nets have other heads than its attention, which GGUF files cannot say:

python scripts/make_kimi_goldens.py
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
from make_goldens import FOLDER, Recipe, fading, filled, make, named, new_model, stored, write_out
from transformers import PreTrainedConfig, PreTrainedModel

NAME = "kimi_linear"
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "routed_scaling_factor": 1.3,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
OTHER_HEADS: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "linear_num_heads": 5,
    "linear_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "q_lora_rank": 20,
    "n_group": 2,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
}
GGUF_NAMES = {
    "lm_head.weight": "output.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.forget_gate.f_a_proj.weight": "ssm_f_a.weight",
    "self_attn.forget_gate.f_b_proj.weight": "ssm_f_b.weight",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.forget_gate.A_log": "ssm_a",
    "self_attn.g_a_proj.weight": "ssm_g_a.weight",
    "self_attn.g_b_proj.weight": "ssm_g_b.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
CLEAR = 4  # makes a seed with which 8-bit activations choose the same experts
PLAIN = ("ssm_conv1d", "ssm_a", "ffn_gate_inp")


def main() -> None:
    for sizes, folders in ((SIZES, ()), (SIZES | OTHER_HEADS, (NAME,))):
        make(NAME, Recipe({}, folders, seed=seed_of, random_model=partial(random_model, sizes), write_gguf=write_gguf))


def seed_of(folder: Path) -> int:
    return crc32(str(folder.relative_to(FOLDER.parent)).encode()) + CLEAR


def random_model(sizes: dict[str, Any], name: str, seed: int) -> PreTrainedModel:
    model = new_model(name, sizes, seed)
    return filled(model, stored(model), fading)


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    writer = gguf.GGUFWriter(path, "kimi-linear")
    add_keys(writer, model.config)
    for name, weight in model.state_dict().items():
        for own, values in converted(name, weight.numpy(), model.config):
            plain = values.ndim == 1 or any(part in own for part in PLAIN)
            writer.add_tensor(own, np.ascontiguousarray(values, np.float32 if plain else np.float16))
    write_out(writer)


def converted(name: str, values: np.ndarray, config: PreTrainedConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields what files have in another order or form."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    blk = f"blk.{layer}"
    if part == "self_attn.conv1d.weight":
        for kind, rows in zip("qkv", np.split(values, 3), strict=True):
            yield f"{blk}.ssm_conv1d_{kind}.weight", rows[None]
    elif part == "self_attn.kv_b_proj.weight":
        heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, found = np.split(heads, [config.qk_nope_head_dim], axis=1)
        yield f"{blk}.attn_k_b.weight", keys.swapaxes(1, 2)
        yield f"{blk}.attn_v_b.weight", found
    elif part == "mlp.experts.gate_up_proj":
        for kind, rows in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"{blk}.ffn_{kind}_exps.weight", rows
    else:
        yield named(name, GGUF_NAMES), -np.exp(values) if part.endswith("A_log") else values


def add_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_name("tiny kimi_linear")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))


if __name__ == "__main__":
    main()

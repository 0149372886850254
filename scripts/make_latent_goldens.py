"""Makes those of tests/models/goldens that have latent attention or sinks, in the way and with the needs of
make_goldens.py; and tests/models/mxfp4, a gpt-oss whose experts are stored as they are published:

python scripts/make_latent_goldens.py [NAME ...]
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import make_expert_goldens
import make_goldens
import numpy as np
import torch
from make_expert_goldens import random_model
from make_goldens import FOLDER, ORIGINAL, PLAIN, PROMPT, SMALLER, Recipe, chosen, logits, make, save, write_out
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

MXFP4 = FOLDER.parent / "mxfp4"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
DEEPSEEK = SMALLER | {
    "first_k_dense_replace": 1,
    "intermediate_size": 16,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 8,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "v_head_dim": 12,
}
GOLDENS: dict[str, dict[str, Any]] = {
    "deepseek_v2": DEEPSEEK | {"q_lora_rank": None, "rope_parameters": PLAIN, "topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK | {"num_mtp_layers": 0},
    "glm4_moe_lite": DEEPSEEK
    | {
        "kv_lora_rank": 48,
        "mlp_layer_types": ["dense", "sparse"],
        "n_shared_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": PLAIN,
        "routed_scaling_factor": 1.8,
    },
    "deepseek_v32": DEEPSEEK
    | {
        "index_head_dim": 64,
        "index_n_heads": 5,
        "index_topk": 38,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "qk_rope_head_dim": 32,
    },
    "glm_moe_dsa": DEEPSEEK
    | {
        "index_head_dim": 20,
        "index_n_heads": 6,
        "index_topk": 38,
        "indexer_types": ["full", "shared", "full"],
        "kv_lora_rank": 20,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_hidden_layers": 3,
        "qk_rope_head_dim": 12,
        "rope_parameters": PLAIN,
    },
    "gpt_oss": SMALLER
    | {
        "head_dim": 8,
        "intermediate_size": 16,
        "num_experts_per_tok": 3,
        "num_local_experts": 4,
        "rope_parameters": YARN | {"truncate": False},
        "sliding_window": 9,
    },
}
WITHOUT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy"},
    "deepseek_v3": {"rope_parameters": YARN},
    "glm4_moe_lite": {"n_group": 1},
    "deepseek_v32": {"index_topk": 48},
    "glm_moe_dsa": {"index_topk": 48},
    "gpt_oss": {"sliding_window": 64},
}
ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "gpt_oss": "gpt-oss",
}
INDEXED = ("deepseek_v32", "glm_moe_dsa")
LEAST_MARGIN = 2e-3  # between the scores of positions that are selected or not, against the largest: caches round keys
SPLIT = ("deepseek_v3", "glm4_moe_lite", *INDEXED)  # their files have keys and values of heads apart
GGUF_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.router": "ffn_gate_inp",
} | make_expert_goldens.GGUF_NAMES
OTHER_NAMES = {"gpt-oss": {"post_attention_layernorm": "post_attention_norm"}}
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def main() -> None:
    make_goldens.GOLDENS |= GOLDENS
    make_goldens.MODEL_TYPES |= {name: name for name in GOLDENS}
    make_goldens.GGUF_NAMES |= GGUF_NAMES
    make_goldens.OTHER_NAMES |= OTHER_NAMES
    for name in chosen(GOLDENS):
        make(name, Recipe(WITHOUT, random_model=clear_model, write_gguf=write_gguf))
        if name == "gpt_oss":
            make_mxfp4(name, crc32(b"gpt_oss in MXFP4"))


def clear_model(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    """Makes a random model. One with an index is the first of which no two scores are so near each other that rounding
    would select other positions."""
    tokens = np.random.default_rng(seed).integers(GOLDENS[name]["vocab_size"], size=PROMPT)
    while name in INDEXED and margin(random_model(name, seed), tokens) < LEAST_MARGIN:
        seed += 1
    return random_model(name, seed, **changes)


def margin(model: PreTrainedModel, tokens: np.ndarray) -> float:
    """Returns the smallest distance between the lowest score that is selected and the highest that is not, over all
    tokens and layers, against the token's largest score. Equal scores are ordered by nothing in transformers."""
    found: list[float] = []
    plain = torch.Tensor.topk

    def watched(scores: torch.Tensor, count: int, dim: int = -1) -> Any:
        if scores.shape[-1] == len(tokens):
            for row in scores.reshape(-1, len(tokens))[count:]:
                high = row.sort(descending=True).values
                found.append(float((high[count - 1] - high[count]) / row[row.isfinite() & (row > -1e30)].abs().max()))
        return plain(scores, count, dim=dim)

    torch.Tensor.topk = watched
    try:
        logits(model, tokens)
    finally:
        torch.Tensor.topk = plain
    return min(found)


def make_mxfp4(name: str, seed: int) -> None:
    """Experts are stored as published; their values are what transformers computes with here, in float32."""
    shutil.rmtree(MXFP4, ignore_errors=True)
    model = random_model(name, seed, intermediate_size=32)
    packed: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("gate_up_proj", "down_proj")):
                packed[f"{key}_blocks"], packed[f"{key}_scales"], values = quantized(weight.swapaxes(1, 2))
                weight.copy_(values.swapaxes(1, 2))
    tokens = np.random.default_rng(seed).integers(model.config.vocab_size, size=PROMPT)
    save(model, MXFP4, tokens, logits(model, tokens))
    file = MXFP4 / "model.safetensors"
    plain = {key: value for key, value in load_file(file).items() if f"{key}_blocks" not in packed}
    save_file(plain | packed, file)
    config = json.loads((MXFP4 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (MXFP4 / "config.json").write_text(json.dumps(config, indent=1))


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., width] -> two codes in each byte, the first in its lower half; powers of two; and what both stand for."""
    groups = weight.unflatten(-1, (-1, 32))
    power = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True))) - 2
    magnitude = (groups.abs() / 2**power)[..., None].sub(FP4).abs().argmin(-1)
    code = magnitude + 8 * (groups < 0)
    blocks = (code[..., ::2] | code[..., 1::2] << 4).to(torch.uint8)
    values = FP4[magnitude] * torch.where(groups < 0, -1, 1) * 2**power
    return blocks.contiguous(), (power[..., 0] + 127).to(torch.uint8), values.flatten(-2)


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    config = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    add_keys(writer, config)
    for name, weight in model.state_dict().items():
        for own, part in parts_of(name, weight.numpy(), config):
            plain = part.ndim == 1 or "ffn_gate_inp" in own or own.endswith(".bias")
            writer.add_tensor(own, np.ascontiguousarray(part, np.float32 if plain else np.float16))
    write_out(writer)


def parts_of(name: str, values: np.ndarray, config: PreTrainedConfig) -> list[tuple[str, np.ndarray]]:
    """One for each tensor that a GGUF file has for it."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("self_attn.sinks"):
        return [(f"{layer}.attn_sinks.weight", values)]
    if config.model_type == "gpt_oss" and ".experts." in name:
        return expert_parts(name, values, layer)
    if config.model_type in SPLIT and "kv_b_proj" in name:
        heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, found = np.split(heads, [config.qk_nope_head_dim], axis=1)
        return [(f"{layer}.attn_k_b.weight", keys.swapaxes(1, 2)), (f"{layer}.attn_v_b.weight", found)]
    return make_expert_goldens.parts_of(name, values, ARCHITECTURES[config.model_type])


def expert_parts(name: str, values: np.ndarray, layer: str) -> list[tuple[str, np.ndarray]]:
    role = "bias" if name.endswith("_bias") else "weight"
    rows = values if role == "bias" else values.swapaxes(1, 2)
    if "gate_up_proj" in name:
        return [(f"{layer}.ffn_{part}_exps.{role}", rows[:, i::2]) for i, part in enumerate(("gate", "up"))]
    return [(f"{layer}.ffn_down_exps.{role}", rows)]


def add_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    make_goldens.add_keys(writer, config)
    writer.add_expert_count(config.num_local_experts if writer.arch == "gpt-oss" else config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if writer.arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        return
    split = config.model_type in SPLIT
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    if split:
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_head_count_kv(1)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if split else head)
    writer.add_value_length(config.kv_lora_rank if split else config.v_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(bool(split and config.norm_topk_prob))
    writer.add_expert_group_count(config.n_group)
    if config.model_type in INDEXED:
        writer.add_uint32(f"{writer.arch}.attention.indexer.head_count", config.index_n_heads)
        writer.add_uint32(f"{writer.arch}.attention.indexer.key_length", config.index_head_dim)
        writer.add_uint32(f"{writer.arch}.attention.indexer.top_k", config.index_topk)
    if config.model_type == "glm_moe_dsa":
        types = [int(kind == "full") for kind in config.indexer_types]
        writer.add_array(f"{writer.arch}.attention.indexer.types", types)
    writer.add_expert_group_used_count(config.topk_group)


if __name__ == "__main__":
    main()

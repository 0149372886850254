"""Makes the goldens of Llama 4, and those of families that norm each head's queries and keys, in the way and with the
needs of make_goldens.py; those that GGUF files cannot express are in tests/models/folders:

python scripts/make_llama4_goldens.py [NAME ...]
"""

from __future__ import annotations

from typing import Any

import gguf
import make_goldens
import torch
from make_goldens import ORIGINAL, PLAIN, SMALLER, Recipe, chosen, head_dim_of, make
from transformers import PreTrainedConfig, PreTrainedModel

LAYER_NORMS = {"layer_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA4 = SMALLER | {
    "bos_token_id": 1,
    "head_dim": 12,
    "intermediate_size": 16,
    "intermediate_size_mlp": 24,
    "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_local_experts": 3,
    "rope_parameters": {  # the two factors are equal, as published
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
GOLDENS: dict[str, dict[str, Any]] = {
    "llama4": LLAMA4,
    "llama4_chunks": LLAMA4
    | {
        "attention_bias": True,
        "attention_chunk_size": 7,
        "attn_scale": 0.8,
        "floor_scale": 5,
        "interleave_moe_layer_step": 1,
        "moe_layers": [0, 3],
        "no_rope_layers": [0, 1, 1, 0],
        "num_experts_per_tok": 2,
        "num_key_value_heads": 1,
        "rope_parameters": PLAIN,
        "tie_word_embeddings": True,
        "use_qk_norm": False,
    },
    "cohere_plus": SMALLER | LAYER_NORMS | {"logit_scale": 0.3, "use_qk_norm": True, "rope_parameters": PLAIN},
    "stablelm_12b": SMALLER
    | LAYER_NORMS
    | {
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25},
    },
    "opt_350m": SMALLER
    | LAYER_NORMS
    | {
        "do_layer_norm_before": False,
        "ffn_dim": 40,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "word_embed_proj_dim": 20,
    },
}
WITHOUT: dict[str, list[dict[str, Any]]] = {  # see Recipe
    "llama4": [{"use_qk_norm": False}, {"no_rope_layers": [1] * 4}],
    "llama4_chunks": [{"attention_chunk_size": 64}, {"attn_temperature_tuning": False}, {"num_experts_per_tok": 1}],
    "cohere_plus": [{"use_qk_norm": False}],
    "stablelm_12b": [{"qk_layernorm": False}],
    "opt_350m": [{"activation_function": "silu"}],
}
FOLDERS = ("llama4_chunks", "opt_350m")  # without a GGUF file
make_goldens.GOLDENS |= GOLDENS
make_goldens.MODEL_TYPES |= {
    "llama4": "llama4_text",
    "llama4_chunks": "llama4_text",
    "cohere_plus": "cohere",
    "stablelm_12b": "stablelm",
    "opt_350m": "opt",
}
make_goldens.UNSAID |= {name: {"rms_norm_eps"} for name in ("cohere_plus", "stablelm_12b")}
make_goldens.UNSAID["opt_350m"] = {"rms_norm_eps", "num_key_value_heads", "intermediate_size", "layer_norm_eps"}
make_goldens.ARCHITECTURES |= {"llama4_text": "llama4", "cohere": "command-r"}
make_goldens.OTHER_NAMES |= {
    "llama4": {
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
        **{f"feed_forward.experts.{part}": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
        "feed_forward.router": "ffn_gate_inp",
    },
    "stablelm": {"self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm"},
}


def main() -> None:
    make_goldens.add_keys, make_goldens.weights_of = add_keys, weights_of
    for name in chosen(GOLDENS):
        for change in WITHOUT[name]:
            make(name, Recipe({name: change}, FOLDERS))


def weights_of(model: PreTrainedModel, arch: str) -> dict[str, torch.Tensor]:
    """Returns the weights as files have them: matrices of experts as (out, in), gate and up apart, and the norms of all
    heads in one tensor."""
    found: dict[str, torch.Tensor] = {}
    norms: dict[str, list[torch.Tensor]] = {}
    for name, weight in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = weight.transpose(1, 2).chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}gate.weight": gate.contiguous(), f"{stem}up.weight": up.contiguous()}
        elif name.endswith("experts.down_proj"):
            found[name.replace("down_proj", "down.weight")] = weight.transpose(1, 2).contiguous()
        elif "layernorm.norms." in name:
            norms.setdefault(name.split(".norms.")[0], []).append(weight)
        else:
            found[name] = weight
    return found | {f"{name}.weight": torch.stack(heads) for name, heads in norms.items()}


def add_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = make_goldens.rope_of(config)
    writer.add_name(f"tiny {config.model_type}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    if writer.arch == "llama4":
        writer.add_feed_forward_length(config.intermediate_size_mlp)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(head_dim_of(config))
        writer.add_value_length(head_dim_of(config))
        writer.add_rope_dimension_count(head_dim_of(config))
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    if writer.arch == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
        writer.add_rope_dimension_count(int(head_dim_of(config) * rope["partial_rotary_factor"]))
    else:
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


if __name__ == "__main__":
    main()

"""Makes the goldens of older families in tests/models/goldens, in the way and with the needs of make_goldens.py, and
those that GGUF files cannot express in tests/models/folders:

python scripts/make_older_goldens.py [NAME ...]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import make_goldens
import torch
from make_goldens import PLAIN, SMALLER, Recipe, chosen, head_dim_of, make
from transformers import PreTrainedConfig, PreTrainedModel

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NEOX = SMALLER | TOKENS | {"hidden_size": 36, "num_attention_heads": 3, "layer_norm_eps": 1e-5, "hidden_act": "gelu"}
FALCON = SMALLER | TOKENS | {"layer_norm_epsilon": 1e-5, "ffn_hidden_size": 56, "rope_parameters": PLAIN}
GOLDENS: dict[str, dict[str, Any]] = {
    "gpt_neox": NEOX | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    "gpt_neox_serial": NEOX
    | {
        "use_parallel_residual": False,
        "attention_bias": False,
        "hidden_act": "gelu_fast",
        "tie_word_embeddings": True,
        "rope_parameters": PLAIN | {"partial_rotary_factor": 1.0},
    },
    "phi": SMALLER
    | TOKENS
    | {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}},
    "falcon": FALCON,
    "falcon_grouped": FALCON
    | {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
        "tie_word_embeddings": False,
        "ffn_hidden_size": 48,
    },
    "minicpm": SMALLER
    | {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 2**0.5,
        "attention_multiplier": 8**-0.5,
        "logits_scaling": 32 / 12,
        "tie_word_embeddings": True,
        "rope_parameters": PLAIN,
    },
    "opt": SMALLER | TOKENS | {"ffn_dim": 40},
}
WITHOUT: dict[str, dict[str, Any]] = {  # see Recipe
    "gpt_neox": {"use_parallel_residual": False},
    "gpt_neox_serial": {"use_parallel_residual": True},
    "phi": {"rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}},
    "falcon": {"rope_parameters": PLAIN | {"rope_theta": 100.0}},
    "minicpm": {"residual_multiplier": 1.4},
    "opt": {"activation_function": "silu"},
}
FOLDERS = ("opt", "gpt_neox_serial", "falcon_grouped")  # in tests/models/folders
MINICPM = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 12}
NEOX_NAMES = {
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
make_goldens.GOLDENS |= GOLDENS
make_goldens.FAMILIES += tuple(GOLDENS)
make_goldens.MODEL_TYPES |= {"gpt_neox_serial": "gpt_neox", "falcon_grouped": "falcon", "minicpm": "granite"}
make_goldens.UNSAID |= {name: {"rms_norm_eps"} for name in GOLDENS if name != "minicpm"}
for name in GOLDENS:
    if not name.startswith(("phi", "minicpm")):
        make_goldens.UNSAID[name] |= {"num_key_value_heads"}
    if name.startswith(("falcon", "opt")):
        make_goldens.UNSAID[name] |= {"intermediate_size"}
make_goldens.ARCHITECTURES |= {"gpt_neox": "gptneox", "phi": "phi2", "granite": "minicpm"}
make_goldens.INTERLEAVED |= {"minicpm"}
make_goldens.OTHER_NAMES |= {
    "gptneox": NEOX_NAMES,
    "falcon": NEOX_NAMES
    | {
        "transformer.word_embeddings": "token_embd",
        "transformer.ln_f": "output_norm",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "ln_attn": "attn_norm_2",
        "ln_mlp": "attn_norm",
    },
    "phi2": {
        "model.final_layernorm": "output_norm",
        "self_attn.dense": "attn_output",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
}


def main() -> None:
    make_goldens.add_keys, make_goldens.weights_of = add_keys, weights_of
    for name in chosen(GOLDENS):
        folder = make(name, Recipe(WITHOUT, FOLDERS, ("falcon_grouped",)))
        if name == "minicpm":
            call_it_minicpm(folder / "config.json")


def call_it_minicpm(path: Path) -> None:
    """Transformers has no MiniCPM. Granite computes the same with multipliers that MiniCPM's config implies."""
    config = json.loads(path.read_text()) | MINICPM
    for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        del config[key]
    config |= {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def weights_of(model: PreTrainedModel, arch: str) -> dict[str, torch.Tensor]:
    """Returns the weights as files have them: all queries, then all keys, then all values."""
    weights = {name: weight for name, weight in model.state_dict().items() if not name.endswith("inv_freq")}
    if arch == "falcon" and model.config.new_decoder_architecture:
        return {
            name: in_order(weight, model.config) if ".query_key_value." in name else weight
            for name, weight in weights.items()
        }
    if arch != "gptneox":
        return weights
    heads = model.config.num_attention_heads
    for name in [name for name in weights if ".query_key_value." in name]:
        whole = weights[name]
        weights[name] = whole.reshape(heads, 3, -1, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape).contiguous()
    return weights


def in_order(whole: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Returns q, k and v of groups, each of which has a KV head's queries and then its key and value, one after the
    other."""
    groups = whole.reshape(config.num_kv_heads, -1, head_dim_of(config), *whole.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return torch.cat([part.reshape(-1, *whole.shape[1:]) for part in parts]).contiguous()


def add_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = make_goldens.rope_of(config)
    writer.add_name(f"tiny {writer.arch}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(getattr(config, "ffn_hidden_size", None) or config.intermediate_size)
    if writer.arch == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
    elif writer.arch == "falcon":
        writer.add_tensor_data_layout("jploski")
        writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    if writer.arch in ("gptneox", "phi2"):
        writer.add_rope_dimension_count(int(head_dim_of(config) * rope["partial_rotary_factor"]))
    if writer.arch == "minicpm":
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.layer_norm_epsilon)


if __name__ == "__main__":
    main()

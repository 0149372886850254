"""Makes tests/models/goldens: tiny random checkpoints, and the logits that transformers computes from them in float32.

Every golden is a Hugging Face folder (BF16) with the same model as a GGUF file (F16) in it, and expected.npz with a
prompt and its logits. Needs torch, transformers and gguf, which the project itself does not:

    python scripts/make_goldens.py [NAME ...]
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

FOLDER = Path(__file__).parents[1] / "tests" / "models" / "goldens"
Weights = Iterator[tuple[str, torch.Tensor]]
PROMPT = 48
ORIGINAL = 16  # positions before scaling: the prompt goes far beyond

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SMALLER = {"vocab_size": 48, "intermediate_size": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA = SMALLER | {
    "head_dim": 12,
    "intermediate_size": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 10,
    "tie_word_embeddings": True,
}
GLM = SMALLER | {"head_dim": 12, "pad_token_id": 0, "eos_token_id": [1, 2]}
GOLDENS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True, "rope_parameters": PLAIN | {"rope_theta": 100000.0}},
    "untied": {"num_key_value_heads": 4, "rope_parameters": PLAIN},
    "llama3": {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 4.0,
        }
    },
    "bias": {"attention_bias": True, "mlp_bias": True, "rope_parameters": PLAIN},
    "mistral": {"sliding_window": 7, "head_dim": 12, "rope_parameters": PLAIN},
    "ministral": SMALLER | {"sliding_window": 9, "head_dim": 8, "rope_parameters": PLAIN},
    "qwen2": SMALLER | {"tie_word_embeddings": True, "rope_parameters": PLAIN | {"rope_theta": 1000000.0}},
    "qwen3": SMALLER | {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": PLAIN},
    "granite": SMALLER
    | {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
        "rope_parameters": PLAIN,
    },
    "smollm3": SMALLER
    | {
        "num_hidden_layers": 4,
        "pad_token_id": 0,
        "intermediate_size": 16,
        "tie_word_embeddings": True,
        "rope_parameters": PLAIN | {"rope_theta": 50000.0},
    },
    "phi3": SMALLER
    | {"sliding_window": 20, "pad_token_id": 0, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.75}},
    "olmo2": SMALLER | {"rope_parameters": PLAIN | {"rope_theta": 500000.0}},
    "gemma2": GEMMA
    | {
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "num_hidden_layers": 3,
        "rope_parameters": PLAIN,
    },
    "gemma3": GEMMA
    | {
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": PLAIN | {"rope_theta": 1000.0},
        },
    },
    "longrope": SMALLER
    | {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": PROMPT,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": [8.0] * 4,
            "short_factor": [1.0, 1.25, 1.5, 3.0],
            "original_max_position_embeddings": PROMPT,
        },
    },
    "gpt2": SMALLER | {"layer_norm_epsilon": 1e-5, "n_inner": 64, "bos_token_id": 0, "eos_token_id": 0},
    "starcoder2": SMALLER
    | {
        "sliding_window": 10,
        "norm_epsilon": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": PLAIN | {"rope_theta": 1000.0},
    },
    "glm": GLM | {"head_dim": 8, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    "glm4": GLM | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5, "rope_theta": 500.0}},
}
MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "longrope": "phi3",
}  # where it is not the golden's name; a golden of another name is of llama
FAMILIES = ("mistral", "ministral", "qwen2", "qwen3", "granite", "smollm3", "phi3", "olmo2", "gemma2")
FAMILIES += ("gpt2", "starcoder2", "glm", "glm4")
UNSAID = {"gpt2": {"intermediate_size", "num_key_value_heads", "rms_norm_eps"}, "starcoder2": {"rms_norm_eps"}}
SHARDED = "untied"
WITHOUT: dict[str, dict[str, Any]] = {
    "llama3": {"rope_parameters": PLAIN | {"rope_theta": 1000.0}},
    "linear": {"rope_parameters": PLAIN},
    "yarn": {"rope_parameters": PLAIN | {"rope_theta": 100.0}},
    "mistral": {"sliding_window": None},
    "ministral": {"sliding_window": 64},
    "granite": {"residual_multiplier": 0.5},
    "smollm3": {"no_rope_layers": [1] * 4},
    "phi3": {"rope_parameters": PLAIN},
    "longrope": {"rope_parameters": PLAIN},
    "gemma2": {"attn_logit_softcapping": None},
    "gemma3": {"layer_types": ["sliding_attention"] * 6},
    "gpt2": {"scale_attn_weights": False},
    "starcoder2": {"sliding_window": None},
    "glm": {"rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}},
    "glm4": {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
}

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
OTHER_NAMES = {
    "olmo2": AFTER,
    "gemma2": AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
    "gemma3": AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gpt2": {
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "chatglm": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "glm4": {
        "mlp.gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
}
ARCHITECTURES = {
    "mistral": "llama",
    "ministral": "llama",
    "gemma3_text": "gemma3",
    "glm": "chatglm",
}  # where GGUF has another name
SILENT = {"gpt2", "starcoder2", "chatglm"}  # architectures whose files say nothing of a head's size
INTERLEAVED = {"llama", "granite", "smollm3"}  # architectures whose files have q and k turned


def main() -> None:
    for name in chosen(GOLDENS):
        make(name, Recipe(WITHOUT))
        if name == "longrope":
            write_long_side(FOLDER / name / "long.npz", name)


def chosen(goldens: Iterable[str]) -> Iterable[str]:
    """Returns the names that the command line gives, or all."""
    return sys.argv[1:] or goldens


def make(name: str, recipe: Recipe) -> Path:
    """Makes a golden and returns its folder."""
    folder = (FOLDER.parent / "folders" if name in recipe.folders else FOLDER) / name
    seed = recipe.seed(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = recipe.random_model(name, seed)
    tokens = np.random.default_rng(seed).integers(model.config.vocab_size, size=PROMPT)
    expected = logits(model, tokens)
    if name in recipe.without:
        other = recipe.random_model(name, seed, **recipe.without[name])
        difference = np.abs(logits(other, tokens) - expected).max()
        assert difference > recipe.least, f"{name}: {difference}"
    if name not in recipe.folders or name in recipe.files:
        recipe.write_gguf(folder / "model.gguf", model)
    save(model, folder, tokens, expected, **({"max_shard_size": "20KB"} if name == SHARDED else {}))
    print(f"{name:18} {sum(file.stat().st_size for file in folder.iterdir()):8} bytes")
    return folder


def save(model: PreTrainedModel, folder: Path, tokens: np.ndarray, expected: np.ndarray, **shards: str) -> None:
    model.bfloat16().save_pretrained(folder, **shards)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "expected.npz", tokens=tokens.astype(np.int32), logits=expected)


def own_seed(folder: Path) -> int:
    """Returns a golden's own seed: a new golden changes no other."""
    return crc32(folder.name.encode())


def random_model(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    kind = MODEL_TYPES.get(name, name if name in FAMILIES else "llama")
    sizes = {key: size for key, size in SIZES.items() if key not in UNSAID.get(name, ())}
    smaller = {key: value for key, value in GOLDENS[name].items() if key not in UNSAID.get(name, ())}
    model = new_model(kind, sizes | smaller | changes, seed)

    def middle(key: str, weight: torch.Tensor) -> float:
        return 1 if ("norm" in key or ".ln_" in key) and "gemma" not in name else 0  # gains, or gains less one

    return filled(model, model.named_parameters(), middle)


def new_model(kind: str, sizes: dict[str, Any], seed: int) -> PreTrainedModel:
    """Seeds torch and returns a model of that type, in float32."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**deepcopy(sizes))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)


def filled(model: PreTrainedModel, weights: Weights, middle: Callable[[str, torch.Tensor], float]) -> PreTrainedModel:
    """Fills those weights of a model at random, large enough for sharp attention, and exact in BF16 and F16 alike."""
    with torch.no_grad():
        for key, weight in weights:
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.ndim == 1 else 0.4) + middle(key, weight))
            weight.copy_(weight.bfloat16().half())
    return model.float().eval()


def stored(model: PreTrainedModel) -> Weights:
    """Yields the parameters of a model, and then those of its buffers that checkpoints have."""
    yield from model.named_parameters()
    kept = model.state_dict().keys()
    yield from ((key, value) for key, value in model.named_buffers() if key in kept)


def fading(key: str, weight: torch.Tensor) -> float:
    """Returns the middle of a weight of a recurrent model whose states fade slowly enough to reach back far."""
    return -3 if key.endswith("A_log") else 1 if "norm" in key else 0


def logits(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].numpy()


def write_long_side(path: Path, name: str) -> None:
    """Writes what transformers computes beyond the original context, where it takes the other factors: the logits of a
    prompt, and what `generate` makes of its beginning, which crosses the boundary."""
    seed = crc32(name.encode())
    model = random_model(name, seed)
    tokens = np.random.default_rng(seed + 1).integers(model.config.vocab_size, size=2 * PROMPT)
    begin = torch.tensor(tokens[None, : PROMPT - 4])
    made = model.generate(begin, attention_mask=torch.ones_like(begin), max_new_tokens=20, do_sample=False)
    answer = made[0, PROMPT - 4 :].numpy()
    np.savez_compressed(path, tokens=tokens.astype(np.int32), logits=logits(model, tokens), answer=answer)


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture(model.config))
    add_keys(writer, model.config)
    rope = rope_of(model.config)
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    if rope.get("rope_type") == "llama3":
        dims = head_dim_of(model.config)
        plain = rope["rope_theta"] ** -(np.arange(0, dims, 2) / dims)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    for name, weight in weights_of(model, writer.arch).items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            values = weight.numpy() + (1 if "norm" in name and "gemma" in writer.arch else 0)
            if writer.arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
                values = interleaved(values, head_dim_of(model.config))
            plain = values.ndim == 1 or "norm" in name
            writer.add_tensor(gguf_name(name, writer.arch), values.astype(np.float32 if plain else np.float16))
    write_out(writer)


def write_out(writer: gguf.GGUFWriter) -> None:
    """Writes the file, once its keys and tensors are added, and closes it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weights_of(model: PreTrainedModel, arch: str) -> dict[str, torch.Tensor]:
    """As files have them: matrices (out, in), and q, k and v of ChatGLM in one tensor."""
    weights = model.state_dict()
    if arch == "gpt2":
        turned = {name for name in weights if ".c_" in name and name.endswith("weight")}
        return {name: weight.T.contiguous() if name in turned else weight for name, weight in weights.items()}
    if arch == "chatglm":
        for name in [name for name in weights if ".q_proj." in name]:
            parts = [weights.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
            weights[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
    return weights


def rope_of(config: PreTrainedConfig) -> dict[str, Any]:
    """That of layers without a window, where they differ; empty for GPT-2."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def add_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope, head_dim = rope_of(config), head_dim_of(config)
    writer.add_name(f"tiny {config.model_type}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if writer.arch not in SILENT:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if writer.arch == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    if writer.arch == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3_text":
        writer.add_float32("gemma3.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        stretched = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors((1 + np.log(stretched) / np.log(original)) ** 0.5)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])


def architecture(config: PreTrainedConfig) -> str:
    return ARCHITECTURES.get(config.model_type, config.model_type)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Qwen2, Granite and others have no such field."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def interleaved(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of q and k as GGUF's llama files have them: the pair (i, i + D / 2) becomes (2i, 2i + 1)."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str, arch: str) -> str:
    names = GGUF_NAMES | OTHER_NAMES.get(arch, {})
    stem, _, role = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{role}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{names[part]}.{role}"


def named(name: str, names: Mapping[str, str]) -> str:
    """Returns a tensor's name in GGUF files; the names of a layer's tensors are given without the layer."""
    if name in names:
        return names[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{names[part]}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Says how a script makes its goldens."""

    without: Mapping[str, dict[str, Any]]  # changes that move logits: without its feature, a golden would show nothing
    folders: Collection[str] = ()  # goldens that GGUF files cannot express
    files: Collection[str] = ()  # those of `folders` that have a GGUF file beside them
    least: float = 0.3  # what such a change has to move some logit by
    seed: Callable[[Path], int] = own_seed  # that of the golden of a folder
    random_model: Callable[..., PreTrainedModel] = random_model
    write_gguf: Callable[[Path, PreTrainedModel], None] = write_gguf


if __name__ == "__main__":
    main()

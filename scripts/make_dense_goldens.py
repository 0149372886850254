"""Makes further dense ones of tests/models/goldens, in the way and with the needs of make_goldens.py, and those of
tests/models/folders, whose families llama.cpp does not have:

python scripts/make_dense_goldens.py [NAME ...]
"""

from __future__ import annotations

import json
import shutil
from typing import Any
from zlib import crc32

import gguf
import make_goldens
import numpy as np
import torch
from make_goldens import (
    AFTER,
    FOLDER,
    GEMMA,
    ORIGINAL,
    PLAIN,
    PROMPT,
    SMALLER,
    Recipe,
    chosen,
    head_dim_of,
    make,
    write_gguf,
)
from safetensors.torch import save_file
from transformers import PreTrainedConfig

FOUR_LAYERS = SMALLER | {"num_hidden_layers": 4, "intermediate_size": 16}
LAYER_NORMS = {"layer_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 4.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
GOLDENS: dict[str, dict[str, Any]] = {
    "seed_oss": SMALLER | {"head_dim": 12, "num_key_value_heads": 1, "rope_parameters": PLAIN},
    "gemma": SMALLER
    | {"head_dim": 12, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": PLAIN},
    "cohere": SMALLER | LAYER_NORMS | {"logit_scale": 0.3, "rope_parameters": PLAIN},
    "cohere2": FOUR_LAYERS | LAYER_NORMS | {"logit_scale": 0.3, "sliding_window": 7, "rope_parameters": PLAIN},
    "stablelm": SMALLER
    | LAYER_NORMS
    | {"use_qkv_bias": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}},
    "stablelm_parallel": SMALLER
    | LAYER_NORMS
    | {"use_parallel_residual": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    "exaone4": FOUR_LAYERS | {"sliding_window": 9, "rope_parameters": LLAMA3},
    "olmo3": FOUR_LAYERS
    | {
        "num_key_value_heads": 1,
        "sliding_window": 9,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "cwm": FOUR_LAYERS | {"head_dim": 12, "sliding_window": 9, "rope_parameters": LLAMA3},
    "hunyuan": SMALLER
    | {
        "head_dim": 12,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 5.0, "factor": 1.0},
    },
    "embeddinggemma": GEMMA
    | {
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "use_bidirectional_attention": True,
        "rope_parameters": {
            "full_attention": PLAIN | {"rope_theta": 1000000.0},
            "sliding_attention": PLAIN | {"rope_theta": 1000.0},
        },
    },
    "vaultgemma": GEMMA
    | {
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "num_hidden_layers": 3,
        "rope_parameters": PLAIN,
    },
}
WITHOUT: dict[str, dict[str, Any]] = {  # see Recipe
    "cohere": {"logit_scale": 0.2},
    "hunyuan": {"rope_parameters": PLAIN | {"rope_theta": 100.0}},
    "cohere2": {"layer_types": ["sliding_attention"] * 4},
    "stablelm": {"rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}},
    "exaone4": {"layer_types": ["sliding_attention"] * 4},
    "olmo3": {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
    "cwm": {"layer_types": ["sliding_attention"] * 4},
    "vaultgemma": {"attn_logit_softcapping": None},
}
FOLDERS = ("cwm", "vaultgemma")
RMS = ("stablelm", "cohere")  # beginnings of the names of goldens without an RMS norm
make_goldens.GOLDENS |= GOLDENS
make_goldens.FAMILIES += tuple(GOLDENS)
make_goldens.MODEL_TYPES |= {
    "stablelm_parallel": "stablelm",
    "embeddinggemma": "gemma3_text",
    "hunyuan": "hunyuan_v1_dense",
}
make_goldens.UNSAID |= {name: {"rms_norm_eps"} for name in GOLDENS if name.startswith(RMS)}
make_goldens.ARCHITECTURES |= {"cohere": "command-r", "olmo3": "olmo2", "hunyuan_v1_dense": "hunyuan-dense"}
make_goldens.SILENT |= {"stablelm"}
make_goldens.OTHER_NAMES |= {
    "hunyuan-dense": {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "exaone4": AFTER,
    "gemma-embedding": make_goldens.OTHER_NAMES["gemma3"] | {"dense_2": "dense_2", "dense_3": "dense_3"},
}


def main() -> None:
    make_goldens.add_keys = add_keys
    for name in chosen(GOLDENS):
        if name == "embeddinggemma":
            make_embedder()
        else:
            make(name, Recipe(WITHOUT, FOLDERS))


def make_embedder() -> None:
    """EmbeddingGemma, with its two dense layers."""
    name, folder = "embeddinggemma", FOLDER.parent / "folders" / "embeddinggemma"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seed = crc32(name.encode())
    model = make_goldens.random_model(name, seed)
    generator = torch.Generator().manual_seed(seed)
    first, then = (torch.randn(shape, generator=generator).half().float() for shape in ((40, 32), (24, 40)))
    tokens = np.random.default_rng(seed).integers(model.config.vocab_size, size=PROMPT)
    with torch.no_grad():
        states = model.model(torch.tensor(tokens)[None]).last_hidden_state[0]
    make_goldens.weights_of = lambda model, arch: model.state_dict() | {"dense_2.weight": first, "dense_3.weight": then}
    make_goldens.ARCHITECTURES["gemma3_text"] = "gemma-embedding"
    write_gguf(folder / "model.gguf", model)
    model.model.bfloat16().save_pretrained(folder)
    modules = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    for at, weight in ((2, first), (3, then)):
        config = {"in_features": weight.shape[1], "out_features": len(weight), "bias": False}
        config |= {"activation_function": "torch.nn.modules.linear.Identity"}
        (folder / f"{at}_Dense").mkdir()
        (folder / f"{at}_Dense" / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": weight}, folder / f"{at}_Dense" / "model.safetensors")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    listed = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{at}_{kind}" if at else ""}
        for at, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens.astype(np.int32),
        states=states.numpy(),
        embedding=(then @ (first @ states.mean(0))).numpy(),
    )


def add_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = make_goldens.rope_of(config)
    writer.add_name(f"tiny {config.model_type}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    dims = head_dim_of(config)
    writer.add_rope_freq_base(rope["rope_theta"] * rope.get("alpha", 1.0) ** (dims / (dims - 2)))
    add_norms(writer, config)
    if writer.arch not in make_goldens.SILENT:
        writer.add_key_length(head_dim_of(config))
        writer.add_value_length(head_dim_of(config))
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim_of(config) * rope["partial_rotary_factor"]))
    if writer.arch == "gemma-embedding":
        add_embedder(writer, config)
    elif getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if writer.arch != "cohere2":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_float32("olmo2.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])


def add_embedder(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_sliding_window(GEMMA["sliding_window"])  # transformers keeps half of it
    writer.add_float32("gemma-embedding.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_dense_features_dims("dense_2", 32, 40)
    writer.add_dense_features_dims("dense_3", 40, 24)


def add_norms(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    if not hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        return
    writer.add_layer_norm_eps(config.layer_norm_eps)
    if writer.arch == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    else:
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


if __name__ == "__main__":
    main()

"""Makes tests/models/text_parts: tiny models that see, and what transformers answers to a text, in the way and with the
needs of make_goldens.py. Folders have the vision tower, GGUF files have the text part alone:

python scripts/make_vision_goldens.py [NAME ...]
"""

from __future__ import annotations

import shutil
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import make_expert_goldens
import make_goldens
import numpy as np
import torch
from make_expert_goldens import parts_of
from make_goldens import FOLDER as GOLDEN_FOLDER
from make_goldens import PLAIN, PROMPT, SIZES, SMALLER, add_keys, logits
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

FOLDER = GOLDEN_FOLDER.parent / "text_parts"
MROPE = PLAIN | {"rope_theta": 1000.0, "mrope_section": [2, 1, 1]}
QWEN = SIZES | SMALLER | {"rope_parameters": MROPE}
PATCHES = {"patch_size": 2, "spatial_merge_size": 1, "temporal_patch_size": 1, "num_heads": 1, "depth": 1}
TOWER = PATCHES | {"hidden_size": 8, "intermediate_size": 8, "out_hidden_size": 32}
DEEP = TOWER | {"num_position_embeddings": 4, "deepstack_visual_indexes": []}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GOLDENS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"text_config": QWEN | {"num_key_value_heads": 1}, "vision_config": TOWER},
    "qwen3_vl": {"text_config": QWEN | {"head_dim": 12}, "vision_config": DEEP, "tie_word_embeddings": True},
    "qwen3_vl_moe": {"text_config": QWEN | {"head_dim": 8} | EXPERTS, "vision_config": DEEP},
    "internvl": {
        "text_config": SIZES | SMALLER | {"model_type": "qwen2", "rope_parameters": PLAIN},
        "vision_config": {
            "hidden_size": 8,
            "image_size": [4, 4],
            "intermediate_size": 8,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "patch_size": [2, 2],
        },
    },
}
ARCHITECTURES = {"qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe", "internvl": "qwen2"}


def main() -> None:
    make_goldens.GGUF_NAMES |= make_expert_goldens.GGUF_NAMES
    for name in sys.argv[1:] or GOLDENS:
        make(name, FOLDER / name, crc32(name.encode()))


def make(name: str, folder: Path, seed: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model = random_model(name, seed)
    tokens = np.random.default_rng(seed).integers(model.config.text_config.vocab_size, size=PROMPT)
    expected = logits(model, tokens)
    write_gguf(folder / "model.gguf", name, model)
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "expected.npz", tokens=tokens.astype(np.int32), logits=expected)
    print(f"{name:10} {sum(file.stat().st_size for file in folder.iterdir()):8} bytes")


def random_model(name: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[name](**deepcopy(GOLDENS[name]))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            middle = 1 if "norm" in key else 0
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.ndim == 1 else 0.4) + middle)
            weight.copy_(weight.bfloat16().half())
    return model.float().eval()


def write_gguf(path: Path, name: str, model: PreTrainedModel) -> None:
    """Writes the text part; llama.cpp has the vision tower in a file of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    config = model.config.text_config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[name])
    add_keys(writer, config)
    if "mrope_section" in config.rope_parameters:
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    if writer.arch.startswith("qwen3vl"):
        writer.add_num_deepstack_layers(len(model.config.vision_config.deepstack_visual_indexes))
    if writer.arch == "qwen3vlmoe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key, weight in model.state_dict().items():
        text = "language_model" in key or key.startswith("lm_head")
        if not text or (key == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        for own, part in parts_of(key.replace("language_model.", ""), weight.numpy(), writer.arch):
            plain = part.ndim == 1 or "ffn_gate_inp" in own
            writer.add_tensor(own, part.astype(np.float32 if plain else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()

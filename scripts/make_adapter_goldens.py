"""Makes tests/models/adapters: random LoRA adapters of the tiny models in tests/models/goldens, saved by PEFT, and the
logits that transformers computes in float32 with each merged into its model.

Every golden is a PEFT folder with expected.npz in it; one has the same adapter as a GGUF file, too. Needs torch,
transformers, peft and gguf, which the project itself does not:

    python scripts/make_adapter_goldens.py [NAME ...]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

MODELS = Path(__file__).parents[1] / "tests" / "models"
FOLDER = MODELS / "adapters"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GOLDENS: dict[str, dict[str, Any]] = {  # by the name of the base's golden
    "tied": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "untied": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": [*ALL, "lm_head"],
        "rank_pattern": {"q_proj": 5, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 9},
    },
    "phi3": {"r": 4, "lora_alpha": 16, "use_rslora": True, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    "gpt2": {"r": 4, "lora_alpha": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "gemma2": {"r": 2, "lora_alpha": 8, "target_modules": ALL},
    "qwen2": {"r": 20, "lora_alpha": 20, "target_modules": r".*\.(q_proj|v_proj|up_proj)"},
    "deepseek_v2": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"]},
    "qwen35": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "down_proj", "out_proj"]},
}
AS_GGUF = "tied"
HEADS = {"attn_q": 4, "attn_k": 2}  # of that model
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def make(name: str, config: dict[str, Any]) -> None:
    """Writes one golden."""
    out = FOLDER / name
    shutil.rmtree(out, ignore_errors=True)
    torch.manual_seed(crc32(name.encode()))
    base = load_base(name)
    model = get_peft_model(base, LoraConfig(init_lora_weights=False, **config))
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if "lora_" in n):
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)
    shrink(out)
    tokens = np.load(MODELS / "goldens" / name / "expected.npz")["tokens"]
    merged = PeftModel.from_pretrained(load_base(name), out).merge_and_unload().eval()
    with torch.no_grad():
        logits = merged(torch.tensor(tokens[None].astype(np.int64))).logits[0]
    np.savez_compressed(out / "expected.npz", logits=logits.float().numpy())
    if name == AS_GGUF:
        write_gguf(out)


def load_base(name: str) -> Any:
    """Loads the golden that an adapter is of, in float32."""
    return AutoModelForCausalLM.from_pretrained(MODELS / "goldens" / name, dtype=torch.float32).eval()


def shrink(out: Path) -> None:
    """Leaves out of the config where the base was, and rounds tensors to F16, which the files' size is half of."""
    file = out / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": ""}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = load_file(out / "adapter_model.safetensors")
    save_file({name: value.astype(np.float16) for name, value in tensors.items()}, out / "adapter_model.safetensors")


def write_gguf(out: Path) -> None:
    """Writes the adapter as llama.cpp's converter does: rows of q and k in the order of interleaved RoPE pairs."""
    writer = gguf.GGUFWriter(out / "adapter.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(GOLDENS[AS_GGUF]["lora_alpha"]))
    for name, value in load_file(out / "adapter_model.safetensors").items():
        module, _, kind = name.removeprefix("base_model.model.model.layers.").removesuffix(".weight").rpartition(".")
        layer, _, part = module.partition(".")
        theirs = PARTS[part]
        if kind == "lora_B" and theirs in HEADS:
            heads = HEADS[theirs]
            rows, rank = value.shape
            value = value.reshape(heads, 2, rows // heads // 2, rank).swapaxes(1, 2).reshape(rows, rank)
        writer.add_tensor(f"blk.{layer}.{theirs}.weight.{kind.lower()}", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    for chosen in sys.argv[1:] or GOLDENS:
        make(chosen, GOLDENS[chosen])

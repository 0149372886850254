"""Makes tests/models/float8: FP8 checkpoints with each kind of scale, and the logits that transformers computes in
float32 from what torch makes of their weights; values.npz has what torch makes of every code.

Needs torch, transformers, safetensors and gguf, as make_goldens.py does:

    python scripts/make_float8_goldens.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_goldens import PROMPT, logits, random_model
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[1] / "tests" / "models" / "float8"
LARGEST = 448.0
BLOCK = (16, 16)

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
}
CONFIGS: dict[str, dict[str, Any]] = {  # by folder
    "tensor": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "channel": COMPRESSED,
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
}
MODELS = {"tensor": "bias", "channel": "linear", "block": "mistral"}  # of make_goldens.py


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    codes = torch.arange(256, dtype=torch.uint8)
    kinds = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    np.savez_compressed(FOLDER / "values.npz", **{name: codes.view(kind).float() for name, kind in kinds.items()})
    for seed, kind in enumerate(CONFIGS):
        write(kind, seed)
        print(f"{kind:8} {sum(file.stat().st_size for file in (FOLDER / kind).iterdir()):8} bytes")


def write(kind: str, seed: int) -> None:
    model = random_model(MODELS[kind], seed)
    stored: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                codes, scale, values = quantized(weight, kind)
                weight.copy_(values)
                stored[name] = codes
                stored[f"{name}_scale{'_inv' if kind == 'block' else ''}"] = scale
            else:
                stored[name] = weight.bfloat16()
    if kind == "tensor":
        stored |= {
            f"{name.removesuffix('weight')}input_scale": torch.tensor(0.02)
            for name in stored
            if name.endswith("_proj.weight")
        }
    tokens = np.random.default_rng(seed).integers(model.config.vocab_size, size=PROMPT)
    folder = FOLDER / kind
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": [type(model).__name__], "quantization_config": CONFIGS[kind]}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    np.savez_compressed(folder / "expected.npz", tokens=tokens.astype(np.int32), logits=logits(model, tokens))


def quantized(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and the values that both stand for."""
    rows, columns = weight.shape
    down, across = {"tensor": (rows, columns), "channel": (1, columns), "block": BLOCK}[kind]
    padded = torch.zeros(-(-rows // down) * down, -(-columns // across) * across)
    padded[:rows, :columns] = weight
    blocks = padded.unflatten(0, (-1, down)).unflatten(2, (-1, across))
    scale = blocks.abs().amax((1, 3)) / LARGEST
    if kind == "channel":
        scale = scale.bfloat16().float()
    spread = scale.repeat_interleave(down, 0).repeat_interleave(across, 1)[:rows, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    stored = {"tensor": scale[0, 0], "channel": scale.bfloat16(), "block": scale}[kind]
    return codes, stored, codes.float() * spread


if __name__ == "__main__":
    main()

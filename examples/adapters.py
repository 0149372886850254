"""Makes a tiny adapter (LoRA) of the default model, and asks with it and without it in one batch.

The adapter has random weights: it shows how adapters are used, not what training does.

    pip install safetensors
    python examples/adapters.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from penstock import LLM, LoRARequest, SamplingParams

LAYERS, WIDTH, RANK = 30, 576, 4  # of SmolLM2-135M; `penstock show smollm2` has them


def make_adapter(folder: Path) -> Path:
    """Writes an adapter as PEFT does: B·A is added to the query projection of every layer."""
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = random.normal(0, 0.1, (RANK, WIDTH)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = random.normal(0, 0.1, (WIDTH, RANK)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


with tempfile.TemporaryDirectory() as folder, LLM("smollm2", max_len=512) as llm:
    adapter = LoRARequest("odd", lora_path=str(make_adapter(Path(folder))))
    question = [{"role": "user", "content": "Name a metal."}]
    params = SamplingParams(max_tokens=24, temperature=0)
    plain, odd = llm.chat([question, question], params, lora_request=[None, adapter])
    print(f"without: {plain.text}\nwith:    {odd.text}")

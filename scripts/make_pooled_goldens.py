"""Makes tests/models/pooled.npz: what transformers computes in float32 for embeddings of the tiny checkpoints in
tests/models/goldens, and of a text by the default model, whose GGUF file it widens first.

The mean of all hidden states after the last norm, and the last one. Needs what make_goldens.py needs:

    python scripts/make_pooled_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

FOLDER = Path(__file__).parents[1] / "tests" / "models"
TEXT = "The level of a river is a poor guide to how much water it carries: floods move the gravel of the bed."


def main(gguf: Path) -> None:
    found: dict[str, np.ndarray] = {}
    for folder in sorted((FOLDER / "goldens").iterdir()):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with np.load(folder / "expected.npz") as expected:
            found |= pooled(folder.name, model, expected["tokens"])
    tokens = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)(TEXT)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    found |= {"smollm2.tokens": np.array(tokens, np.int32)} | pooled("smollm2", model, np.array(tokens))
    np.savez_compressed(FOLDER / "pooled.npz", **found)


def pooled(name: str, model: PreTrainedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    with torch.no_grad():
        states = model.eval().base_model(torch.tensor(tokens)[None].long()).last_hidden_state[0]
    return {f"{name}.mean": states.mean(0).numpy(), f"{name}.last": states[-1].numpy()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))

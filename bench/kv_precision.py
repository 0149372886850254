"""Measures how far the formats of a CPU's KV cache move the logits of each family, against a cache of float32.

    python bench/kv_precision.py [GOLDEN ...]

Every golden of the tests runs random prompts. Its weights are large, so its attention is sharp: a trained model moves
less. A position moves far where another expert is selected, which few positions do; how many is printed beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.model.load import load_model, open_checkpoint

GOLDENS = Path(__file__).parents[1] / "tests" / "models" / "goldens"
PROMPTS = 40
LENGTH = 48
BLOCK = 16
FAR = 0.3  # logits are about 2 wide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="goldens; without any, all")
    names = parser.parse_args().names or sorted(folder.name for folder in GOLDENS.iterdir())
    print(f"{'golden':<14}{'experts':>8}  " + "".join(f"{kv:>6}: median     max   far" for kv in ("f16", "int8")))
    for name in names:
        exact = logits(name, "f32")
        moved = [np.abs(logits(name, kv) - exact).max(axis=1) for kv in ("f16", "int8")]
        cells = (f"{np.median(one):>14.1e}{one.max():>8.2g}{(one > FAR).mean():>6.2%}" for one in moved)
        experts = open_checkpoint(GOLDENS / name).spec.experts
        print(f"{name:<14}{experts.top_k if experts else '':>8}  " + "".join(cells), flush=True)


def logits(name: str, kv: str) -> Any:
    """Returns the logits of all positions of all prompts."""
    checkpoint = open_checkpoint(GOLDENS / name)
    backend = CpuBackend(kv=kv)
    backend.load(load_model(checkpoint, backend))
    blocks = -(-LENGTH // BLOCK)
    backend.reserve_kv(blocks, BLOCK, 1)
    prompts = np.random.default_rng(0).integers(checkpoint.spec.vocab, size=(PROMPTS, LENGTH)).tolist()
    return np.concatenate([backend.logits(greedy_batch([Chunk(prompt, 0, range(blocks))])) for prompt in prompts])


if __name__ == "__main__":
    main()

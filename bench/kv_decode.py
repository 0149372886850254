"""Measures decoding on a CPU over a long context, in several formats of the KV cache, in turns.

    python bench/kv_decode.py MODEL [--context 4000] [--rows 1] [--rounds 9] [--kv f16 int8 int8:int4 int4]

Every round decodes some tokens with each format, on one thread, and the quickest step of a round counts. It prints the
median over the rounds in milliseconds of processor time, which other work on the machine changes little, their spread,
the ratio to the first format, and how many tokens fit in a GiB.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.model.load import load_model, open_checkpoint

BLOCK = 16
STEPS = 8  # of a round
PREFILL = 512  # tokens of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kv", nargs="+", default=["f16", "int8", "int8:int4", "int4"])
    given = parser.parse_args()
    formats = {kv: Decoding(given.model, kv, given.context, given.rows) for kv in given.kv}
    for _ in range(given.rounds):
        for decoding in formats.values():
            decoding.run()
    first = median(formats[given.kv[0]].seconds)
    for kv, decoding in formats.items():
        took = decoding.seconds
        print(
            f"{kv:<10}{median(took) * 1e3:>8.2f} ms a step ({min(took) * 1e3:.2f} to {max(took) * 1e3:.2f})"
            f"{median(took) / first:>7.2f}x{(1 << 30) // decoding.kv_token:>10,} tokens in a GiB"
        )


class Decoding:
    """Decodes rows whose contexts are in one backend's cache; every step writes the same position again."""

    def __init__(self, model: Path, kv: str, context: int, rows: int) -> None:
        checkpoint = open_checkpoint(model)
        self.seconds: list[float] = []
        self._backend = CpuBackend(1, kv=kv)
        self._backend.load(load_model(checkpoint, self._backend))
        self.kv_token = self._backend.memory_needs().kv_bytes_per_token
        blocks = -(-(context + 1) // BLOCK)
        self._backend.reserve_kv(rows * blocks, BLOCK)
        prompt = np.random.default_rng(0).integers(checkpoint.spec.vocab, size=context).tolist()
        tables = [range(row * blocks, (row + 1) * blocks) for row in range(rows)]
        for table in tables:
            for at in range(0, context, PREFILL):
                self._backend.logits(greedy_batch([Chunk(prompt[at : at + PREFILL], at, table, sample=0)]))
        self._step = greedy_batch([Chunk([1], context, table, slot) for slot, table in enumerate(tables)])

    def run(self) -> None:
        """Decodes some tokens; keeps what the quickest of these steps took."""
        took = []
        for _ in range(STEPS):
            start = time.process_time()
            self._backend.logits(self._step)
            took.append(time.process_time() - start)
        self.seconds.append(min(took))


if __name__ == "__main__":
    main()

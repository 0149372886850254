"""Ours beside `transformers.generate`, the yardstick that everyone knows: 64 requests, on a CPU or a GPU.

    python bench/yardstick.py MODEL --python PYTHON --device cpu --rounds 3

PYTHON is an interpreter that has torch and transformers (and gguf, where MODEL is a GGUF file). Both get the same token
ids: 64 prompts of 32 to 224 tokens, 64 tokens for each answer whatever it says. Ours schedules them; transformers gets
them as one batch, padded on the left. Every figure comes from a fresh process, without the time to load the model.

A round runs both, beginning with the other one each time. The ratio is the median over rounds of ours to theirs beside
it, with the smallest and the largest, so that a machine that slows down for a while harms both.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from peers import Figures, Penstock, Transformers

CELL = "requests64"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--python", type=Path, required=True, help="an interpreter that has torch and transformers")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    peers = [Penstock(args.threads, args.device), Transformers(args.python, args.threads, args.device)]
    rounds: list[dict[str, Figures]] = []
    for number in range(args.rounds):
        order = peers[::-1] if number % 2 else peers
        rounds.append({peer.name: peer.measure(CELL, args.model, number) for peer in order})
        print(f"round {number + 1}: {rounds[-1]}", flush=True)
    for unit, worse in (("tok/s", False), ("first token s", True)):
        print(f"{unit}: {spread([ratio(found, unit, worse) for found in rounds])}")


def ratio(found: dict[str, Figures], unit: str, worse: bool) -> float:
    """How many times better ours is; `worse`: the larger figure is the worse one."""
    ours, theirs = found["penstock"][unit], found["transformers"][unit]
    return theirs / ours if worse else ours / theirs


def spread(ratios: list[float]) -> str:
    return f"ours is {statistics.median(ratios):.2f} times as good ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()

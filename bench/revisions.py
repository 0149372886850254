"""Compares two checkouts of Penstock on the same model, alternately, on the CPU.

    python bench/revisions.py OLD NEW MODEL [--cells decode,prefill,batch8,batch32,start] [--rounds 5] [--threads 2]

OLD and NEW are folders with a `src` whose native extension is built. Every figure comes from a fresh process. A round
runs each checkout once, beginning with the other one each time. The ratio is the median over rounds of NEW to OLD, so
that a machine that slows down for a while harms both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

RUN = "import sys, peers; print(__import__('json').dumps(peers.Penstock(int(sys.argv[3])).measure(sys.argv[1], "
RUN += "__import__('pathlib').Path(sys.argv[2]), int(sys.argv[4]))))"
LOWER_IS_BETTER = ("s", "MB")


def measure(checkout: Path, cell: str, model: Path, threads: int, seed: int) -> dict[str, float]:
    """Returns the figures of one cell, measured by that checkout's own benchmark in a fresh process."""
    environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout / 'bench'}"}
    words = [sys.executable, "-c", RUN, cell, str(model), str(threads), str(seed)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{checkout} failed in {cell}:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(args: argparse.Namespace, cell: str) -> list[str]:
    """Runs all rounds of one cell; returns a line per unit: medians, the median ratio and the ratios' range."""
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds):
        order = ("old", "new") if number % 2 == 0 else ("new", "old")
        rounds.append({name: measure(getattr(args, name), cell, args.model, args.threads, number) for name in order})
    lines = []
    for unit in rounds[0]["old"]:
        old, new = ([each[name][unit] for each in rounds] for name in ("old", "new"))
        ratios = sorted(b / a for a, b in zip(old, new, strict=True))
        better = "lower" if unit in LOWER_IS_BETTER else "higher"
        lines.append(
            f"| {cell} | {unit} ({better} is better) | {statistics.median(old):.4g} | {statistics.median(new):.4g} "
            f"| {statistics.median(ratios):.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cells", default="decode,prefill,batch8,batch32,start")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print("| cell | unit | old | new | ratio | range |\n|---|---|---|---|---|---|", flush=True)
    for cell in args.cells.split(","):
        for line in compare(args, cell):
            print(line, flush=True)


if __name__ == "__main__":
    main()

"""How long a step takes, by how many sequences decode and how many drafted tokens each of them verifies.

    python bench/step_cost.py
    python bench/step_cost.py --model MODEL --rows 1,8 --drafts 0,1,4 --threads 1 --context 512 --isa avx2

A cell is the shortest of many steps, and its ratio to the first cell of its line. The step of `rows` sequences with
`drafts` tokens each computes rows x (drafts + 1) tokens and samples every one of them greedily; each sequence has a
KV cache of its own. Cells are taken in turn, a few steps each, so that a machine that slows down harms all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.backend.base import Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.model.load import load_model, open_checkpoint
from penstock.store import DEFAULT, find

BLOCK = 16
TURN = 4  # steps of a cell in one turn


def main() -> None:
    args = arguments()
    path = args.model or stored_model()
    rows, drafts = numbers(args.rows), numbers(args.drafts)
    for threads in numbers(args.threads):
        backend = CpuBackend(threads, isa=args.isa)
        backend.load(load_model(open_checkpoint(path), backend))
        blocks = -(-(args.context + max(drafts) + 1) // BLOCK)
        backend.reserve_kv(blocks * max(rows), BLOCK)
        cells = {(r, k): step_of(r, k, args.context, blocks) for r in rows for k in drafts}
        best = dict.fromkeys(cells, float("inf"))
        for _ in range(args.turns):
            for cell, batch in cells.items():
                best[cell] = min(best[cell], backend.time_step(batch, TURN))
        print(f"\n{path.stem}, {backend.name}, context {args.context}")
        print(f"{'rows':>5}" + "".join(f"{f'k={k}, ms':>15}" for k in drafts))
        for r in rows:
            shown = (f"{best[r, k] * 1e3:8.2f} {best[r, k] / best[r, drafts[0]]:5.2f}x" for k in drafts)
            print(f"{r:5}" + "".join(shown) + f"   {best[r, drafts[0]] / best[rows[0], drafts[0]]:5.2f}x", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help=f"a file or folder; without one {DEFAULT}, which must be stored")
    parser.add_argument("--rows", default="1,4,8,16,32")
    parser.add_argument("--drafts", default="0,1,2,3,4,8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--context", type=int, default=512, help="tokens that each sequence has")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--turns", type=int, default=10)
    return parser.parse_args()


def stored_model() -> Path:
    entry = find(DEFAULT)
    if entry is None:
        raise SystemExit(f"{DEFAULT} is not stored: run `penstock pull {DEFAULT}`, or give --model")
    return entry.path


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def step_of(rows: int, drafts: int, context: int, blocks: int) -> Batch:
    """Returns a step in which each of `rows` sequences continues behind its context. What KV holds does not matter."""
    tokens = [1 + i for i in range(drafts + 1)]
    return greedy_batch([Chunk(tokens, context, range(r * blocks, (r + 1) * blocks), r) for r in range(rows)])


if __name__ == "__main__":
    main()

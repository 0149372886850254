"""Speculation on a GPU: a model of the shape of Llama-3.1-8B with random weights, drafts with a set acceptance.

    PYTHONPATH=src python bench/gpu/speculation.py [--kind bf16] [--rows 1 64] [--acceptance 0 0.8 0.95] [--rounds 3]

Needs torch and Triton, and a GPU to itself. Every step is computed; answers are made up so that a drafted token is
right with the given probability (bench/scripted.py). With drafts and without in turn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cells import BLOCK_SIZE, llama8b
from random_weights import KINDS, RandomWeights
from scripted import Runner, Script, described, jumping

from penstock.backend.cuda import CudaBackend
from penstock.engine.assemble import assemble
from penstock.engine.drafts.drafting import Drafting
from penstock.engine.engine import Engine
from penstock.model.families.llama import build
from penstock.types import Limits

ROWS, STEP_TOKENS, VOCAB = 256, 8192, 128256


def opened(kind: str, layers: int) -> Engine:
    backend = CudaBackend(STEP_TOKENS, ROWS)
    backend.load(build(llama8b(layers), RandomWeights(backend._packer.target.workspace, kind)))
    limits = Limits(16384, ROWS, STEP_TOKENS, BLOCK_SIZE, 20_000, VOCAB)
    backend.reserve_kv(limits.num_blocks, BLOCK_SIZE)
    backend.warm_up()
    for rows in backend.padded_sizes:  # what a server does while it has nothing else to do
        backend.prepare(rows)
        for run in backend._programs[0].program.run_sizes:
            backend.prepare(rows, run=run)
    return assemble(backend, limits, depth=backend.depth, drafting=Drafting(backend.padded_sizes), more=(Script(),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="bf16")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.0, 0.8, 0.95])
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    runner = Runner(opened(args.kind, args.layers))
    for rows in args.rows:
        for acceptance in args.acceptance:
            records = jumping(acceptance, rows, args.tokens)
            runner.run(records, rows, drafts=True)  # shapes are captured and costs learned
            print(
                f"{args.kind}, {rows} rows, {acceptance:.0%}: {described(*runner.compare(records, rows, args.rounds))}"
            )


if __name__ == "__main__":
    main()

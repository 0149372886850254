"""How fast this machine's kernels multiply, by format, instruction set and number of rows.

    python bench/products.py
    python bench/products.py --formats Q4_0,Q6_K --isas avx512vnni,avx2 --rows 1,512 --threads 2 --json products.json
    python bench/products.py --formats Q4_1,Q8_0 --shape 576x1536 --rows 1,2,4,5,8,16,32,64 --threads 1 --peaks

A chain of products, to and fro between two widths, whose weights together are larger than any cache: few rows show the
speed at which weights are read (GB/s of packed weights), many rows the speed of arithmetic (10¹² multiplies and adds a
second). The shortest run of a chain counts. `--peaks` compiles peaks.cpp and tells what one core could do at most.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from penstock.backend.cpu._native import Program, Weight, isas
from penstock.config import available_threads
from penstock.model.tensor import STORAGE


def main() -> None:
    args = arguments()
    if args.peaks:
        print(peaks())
    figures = []
    print(f"{'format':8} {'isa':12} {'rows':>5} {'GB/s':>8} {'TOPS':>8} {'ms':>8}")
    for name in args.formats.split(","):
        weights = chain(name, args.shape, args.megabytes)
        for isa in args.isas.split(","):
            for rows in map(int, args.rows.split(",")):
                figure = measure(weights, isa, rows, args)
                figures.append({"format": name, "isa": isa, "rows": rows} | figure)
                print(
                    f"{name:8} {isa:12} {rows:5} {figure['GB/s']:8.1f} {figure['TOPS']:8.3f} {figure['ms']:8.3f}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(STORAGE))
    parser.add_argument("--isas", default=",".join(isas()))
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--shape", type=shape, default=(2048, 2048), help="the two widths, as in 576x1536")
    parser.add_argument("--megabytes", type=int, default=256, help="of weights in the chain")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peaks", action="store_true", help="measure what one core can do; needs a compiler, c++")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def shape(text: str) -> tuple[int, int]:
    first, second = map(int, text.split("x"))
    return first, second


def peaks() -> str:
    source = Path(__file__).with_name("peaks.cpp")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peaks"
        subprocess.run(["c++", "-std=c++20", "-O2", "-march=native", source, "-o", program], check=True)
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout


def chain(name: str, widths: tuple[int, int], megabytes: int) -> list[Weight]:
    """Random bytes are random weights; what they are worth does not matter to the clock."""
    format = STORAGE[name]
    size = widths[0] * widths[1] // format.values * format.bytes
    data = np.random.default_rng(0).integers(0, 64, size, np.uint8)
    weights = []
    for i in range(max(1, megabytes * 1_000_000 // size)):
        weight = Weight(widths[i % 2], [(name, widths[1 - i % 2])])
        weight.fill(0, 0, widths[1 - i % 2], data)
        weights.append(weight)
    return weights


def measure(weights: list[Weight], isa: str, rows: int, args: argparse.Namespace) -> dict[str, float]:
    program = Program(isa, args.threads, "f16")
    table = Weight(args.shape[0], [("F32", 1)])
    prepared = program.prepares(weights[0])
    buffers = [program.buffer("T", width, prepared) for width in args.shape]
    program.embed(table, buffers[0])
    for i, weight in enumerate(weights):
        program.linear(buffers[i % 2], weight, buffers[(i + 1) % 2])
    program.answer(buffers[len(weights) % 2])
    out = np.empty((rows, args.shape[len(weights) % 2]), np.float32)
    ints = [np.zeros(shape, np.int32) for shape in (rows, rows, 2, 1, (1, 1, 1), 0)]
    ints[2][1] = rows
    seconds = []
    for _ in range(args.repeats + 1):
        began = time.perf_counter()
        program.run(*ints, out)
        seconds.append((time.perf_counter() - began) / len(weights))
    best = min(seconds)
    return {
        "ms": best * 1e3,
        "GB/s": weights[0].nbytes / best / 1e9,
        "TOPS": 2 * rows * args.shape[0] * args.shape[1] / best / 1e12,
    }


if __name__ == "__main__":
    main()

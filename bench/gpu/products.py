"""Quantized matrix products on a GPU: are they right, and how fast are they. `penstock doctor --tune` finds tilings.

    PYTHONPATH=src python bench/gpu/products.py      checks, then times the products of the Llama-3.1-8B shape
    PYTHONPATH=src python bench/gpu/products.py --formats Q4_K,FP8   only these
    PYTHONPATH=src python bench/gpu/products.py --json FILE   figures for machines

Needs torch and Triton, and a GPU to itself. Times are of CUDA graphs over more copies of a matrix than a cache holds.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_weights import random_blocks
from random_weights import random_codes as make

from penstock.backend.cuda.kernels import quant_gemm, quant_gemm_small, quant_gemv
from penstock.backend.cuda.kernels.dequantize import dequantize_matrix, dequantize_rows
from penstock.backend.cuda.kernels.fp8 import (
    Fp8Weight,
    cublas_fp8_gemm,
    fp8_gemm_small,
)
from penstock.backend.cuda.kernels.fp8_activations import quantize_activations
from penstock.backend.cuda.kernels.fp8_gemm import fp8_gemm
from penstock.backend.cuda.kernels.split_k import MAX_PARTIALS, SplitKScratch
from penstock.backend.cuda.pack_quantized import CODINGS, pack
from penstock.backend.cuda.transfer import Transfer
from penstock.model.dequantize import dequantize
from penstock.model.tensor import FORMATS, Tensor

SHAPES = {  # rows, width: of Llama-3.1-8B
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
LAYERS = 32
ALL = [*CODINGS, "FP8"]
BANDWIDTH = 4.2e12
MULTIPROCESSORS = 132
CACHE = 300 << 20  # bytes of copies that no cache holds
DEVICE = torch.device("cuda")

MANY_TILING, FP8_TILING = (4, 1, 4, 3), (4, 2, 4, 4)  # tiles, steps, warps and stages, without the split


# ---- matrices ----


def values_of(name: str, weight: Any) -> Any:
    if name == "FP8":
        return weight.values.float() * weight.scales[:, None]
    values = torch.empty(weight.rows, weight.width, device=DEVICE)
    dequantize_matrix(weight, values)
    return values


# ---- checks ----


def difference(got: Any, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def check_packing(name: str) -> float:
    """Packed and read again, against the reference's values."""
    blocks = random_blocks(name, 176, 1536)
    data = blocks.cpu().numpy().reshape(-1)
    want = torch.from_numpy(dequantize(Tensor("", FORMATS[name], (176, 1536), data))).to(DEVICE)
    weight = pack(data, name, 176, 1536, Transfer(DEVICE))
    tokens = torch.tensor([3, 175, 16, 8], dtype=torch.int32, device=DEVICE)
    rows = torch.empty(4, 1536, device=DEVICE)
    dequantize_rows(weight, tokens, rows)
    return max(difference(values_of(name, weight), want), difference(rows, want[tokens.long()]))


def check_products(name: str, scratch: SplitKScratch) -> dict[str, float]:
    """Of each kernel, against float64; widths that do not divide, rows that do not fill a tile, a bias, a gate."""
    errors = {}
    rows, width = 416, 1536
    weight = make(name, rows, width)
    bias = torch.randn(rows, device=DEVICE)
    values = values_of(name, weight).double()
    for count in (1, 3, 8, 16, 17, 64, 100):
        x = torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16)
        want = x.double() @ values.T + bias
        errors[f"{count}"] = difference(run_one(name, x, weight, bias, scratch), want)
        if count <= 16:
            out = torch.full((count, rows // 2), float("nan"), device=DEVICE)
            kernel = fp8_gemm_small if name == "FP8" else quant_gemm_small.quant_gemm_small
            kernel(x, weight, bias, out, gated=True, tiling=quant_gemm_small.Tiling(4, 2, 2))
            want = torch.nn.functional.silu(want[:, : rows // 2]) * want[:, rows // 2 :]
            errors[f"{count} gated"] = difference(out, want)
    if name == "FP8":
        errors["subnormal"] = check_subnormal(scratch)
    return errors


def check_subnormal(scratch: SplitKScratch) -> float:
    """Of values whose exponent is 0."""
    codes = torch.randint(0, 8, (32, 512), device=DEVICE, dtype=torch.uint8)
    weight = Fp8Weight(codes.view(torch.float8_e4m3fn), torch.ones(32, device=DEVICE))
    x = torch.randn(2, 512, device=DEVICE, dtype=torch.bfloat16)
    return difference(run_one("FP8", x, weight, None, scratch), x.double() @ values_of("FP8", weight).double().T)


def run_one(name: str, x: Any, weight: Any, bias: Any, scratch: SplitKScratch) -> Any:
    out = torch.full((len(x), weight.rows), float("nan"), device=DEVICE)
    if name == "FP8" and len(x) > 16:
        codes, scales = quantized(x)
        fp8_gemm(codes, scales, weight, bias, out, quant_gemm.Tiling(4, 32, 2, 3, 4, 3), scratch)
    elif name == "FP8":
        fp8_gemm_small(x, weight, bias, out)
    elif len(x) == 1 and weight.coding.groups > 1:
        quant_gemv.quant_gemv(x, weight, bias, out, tiling=quant_gemv.Tiling(4, 1, 1, 2))
    elif len(x) <= 16:
        quant_gemm_small.quant_gemm_small(x, weight, bias, out)
    else:
        quant_gemm.quant_gemm(x, weight, bias, out, quant_gemm.Tiling(4, 32, 1, 3, 4, 3), scratch)
    return out


def quantized(x: Any) -> tuple[Any, Any]:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.empty(len(x), device=DEVICE)
    quantize_activations(x, codes, scales)
    return codes, scales


# ---- time ----


def seconds(calls: list[Callable[[], None]], at_least: int = 40) -> float:
    """Of one call, when all are made in turn in a CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = max(-(-at_least // len(calls)), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (repeats * len(calls)))
    return min(times[1:])


def copies(name: str, rows: int, width: int) -> list[Any]:
    first = make(name, rows, width)
    return [first, *(make(name, rows, width) for _ in range(max(-(-CACHE // first.bytes), 2) - 1))]


def tiling_for(name: str, count: int, rows: int) -> Any:
    """Returns a tiling that suits products of any shape."""
    if count == 1 and name not in ("FP8", "INT4"):
        return quant_gemv.Tiling(4, 1, 1, 2)
    if count <= 16:
        return quant_gemm_small.DEFAULT
    tiles, steps, warps, stages = FP8_TILING if name == "FP8" else MANY_TILING
    block = max(min(1 << (count - 1).bit_length(), 128), 32)
    programs = -(-rows // (16 * tiles)) * -(-count // block)
    split = min(max(1 << max((MULTIPROCESSORS // programs).bit_length() - 1, 0), 1), 8)
    return quant_gemm.Tiling(tiles, block, steps, split if split * count * rows <= MAX_PARTIALS else 1, warps, stages)


def call_of(name: str, x: Any, coded: Any, weight: Any, out: Any, tiling: Any, scratch: Any) -> Callable[[], None]:
    if isinstance(tiling, quant_gemv.Tiling):
        return lambda: quant_gemv.quant_gemv(x, weight, None, out, tiling=tiling)
    if isinstance(tiling, quant_gemm_small.Tiling):
        kernel = fp8_gemm_small if name == "FP8" else quant_gemm_small.quant_gemm_small
        return lambda: kernel(x, weight, None, out, tiling=tiling)
    if name == "FP8":
        return lambda: fp8_gemm(*coded, weight, None, out, tiling, scratch)
    return lambda: quant_gemm.quant_gemm(x, weight, None, out, tiling, scratch)


def library(name: str, x: Any, coded: Any, weight: Any, workspace: Any, out: Any) -> Callable[[], None]:
    """Values written out in bfloat16, or float8 as it is, and the library's product."""
    if name == "FP8":
        return lambda: cublas_fp8_gemm(*coded, weight, None, out)
    values = workspace[: weight.rows * weight.width].view(weight.rows, weight.width)

    def expanded() -> None:
        dequantize_matrix(weight, values)
        torch.mm(x, values.t(), out=out)

    return expanded


def listed(tiling: Any) -> Any:
    return (
        tiling if tiling == "library" else ["one", *tiling] if isinstance(tiling, quant_gemv.Tiling) else list(tiling)
    )


def measure(name: str, shape: str, counts: list[int], scratch: Any, workspace: Any) -> list[dict[str, Any]]:
    rows, width = SHAPES[shape]
    weights = copies(name, rows, width)
    found = []
    for count in counts:
        if shape == "head" and count > 256:
            continue
        x = torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16)
        out = torch.empty(count, rows, device=DEVICE, dtype=torch.bfloat16)
        coded = quantized(x) if name == "FP8" and count > 16 else None
        cells = []
        if count <= 512:
            tiling = tiling_for(name, count, rows)
            try:
                calls = [call_of(name, x, coded, weight, out, tiling, scratch) for weight in weights]
                cells.append((seconds(calls), tiling))
            except Exception as error:
                print(f"! {name} {shape} {count} {tiling}: {str(error).splitlines()[0][:150]}", flush=True)
        if count > 16 and shape != "head":
            try:
                calls = [library(name, x, coded, weight, workspace, out) for weight in weights]
                cells.append((seconds(calls), "library"))
            except Exception as error:
                print(f"! {name} {shape} {count} library: {str(error).splitlines()[0][:150]}", flush=True)
        cells.sort(key=lambda cell: cell[0])
        if not cells:
            continue
        best, tiling = cells[0]
        ranked = [(round(took * 1e6, 2), listed(which)) for took, which in cells]
        found.append(
            {
                "format": name,
                "shape": shape,
                "rows": count,
                "us": round(best * 1e6, 2),
                "of_limit": round(weights[0].bytes / BANDWIDTH / best, 3),
                "tiling": listed(tiling),
                "ranked": ranked,
            }
        )
    return found


def measure_bf16(counts: list[int]) -> dict[str, dict[int, float]]:
    """The library's product with plain values, for comparison: microseconds."""
    table: dict[str, dict[int, float]] = {}
    for shape, (rows, width) in SHAPES.items():
        number = max(-(-CACHE // (rows * width * 2)), 2)
        weights = [torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(number)]
        table[shape] = {}
        for count in [count for count in counts if count <= 256 or shape != "head"]:
            x = torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16)
            out = torch.empty(count, rows, device=DEVICE, dtype=torch.bfloat16)
            calls = [partial(torch.mm, x, weight.t(), out=out) for weight in weights]
            table[shape][count] = round(seconds(calls, 20) * 1e6, 2)
    return table


def measure_step(name: str, count: int, best: dict[tuple[str, str, int], Any], scratch: Any) -> dict[str, Any]:
    """All the products of a decode step, each with a matrix of its own, in one graph."""
    calls, size = [], 0
    for shape in [*[shape for shape in SHAPES if shape != "head"] * LAYERS, "head"]:
        rows, width = SHAPES[shape]
        weight = make(name, rows, width)
        x = torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16)
        out = torch.empty(count, rows, device=DEVICE, dtype=torch.bfloat16)
        coded = quantized(x) if name == "FP8" and count > 16 else None
        tiling = best[name, shape, count]
        if tiling == "library":
            calls.append(lambda c=coded, w=weight, o=out: cublas_fp8_gemm(*c, w, None, o))
        else:
            calls.append(call_of(name, x, coded, weight, out, tiling, scratch))
        size += weight.bytes
    took = seconds(calls, 1) * len(calls)
    return {"format": name, "rows": count, "ms": round(took * 1e3, 3), "of_limit": round(size / BANDWIDTH / took, 3)}


def tiling_of(cell: dict[str, Any]) -> Any:
    """The best one, of those that keep a matrix quantized."""
    which = next(
        which for _, which in cell["ranked"] if which != "library" or cell["format"] == "FP8" or cell["rows"] > 512
    )
    if which[0] == "one":
        return quant_gemv.Tiling(*which[1:])
    return (
        which if which == "library" else (quant_gemm_small.Tiling if cell["rows"] <= 16 else quant_gemm.Tiling)(*which)
    )


# ---- everything ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(ALL))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256,4096")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--step", default="1,8,64", help="rows of the whole step's products")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    names, counts = args.formats.split(","), [int(count) for count in args.rows.split(",")]
    began = time.perf_counter()
    torch.manual_seed(0)
    scratch = SplitKScratch.on(DEVICE)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "checks": {}, "products": [], "steps": []}

    for name in names:
        try:
            errors = check_products(name, scratch)
            if name in FORMATS:
                errors["packing"] = check_packing(name)
            report["checks"][name] = errors
            small = max(value for key, value in errors.items() if key not in ("17", "64", "100"))
            large = max(errors[key] for key in ("17", "64", "100"))
            print(f"check {name}: differences up to {small:.1e}, of more than 16 rows {large:.1e}", flush=True)
            if not (small < 1e-4 and large < (0.06 if name == "FP8" else 0.005)):
                print(f"WRONG {errors}", flush=True)
        except Exception:
            traceback.print_exc(limit=4)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)

    if not args.check_only:
        workspace = torch.empty(28672 * 4096, device=DEVICE, dtype=torch.bfloat16)
        try:
            report["bf16"] = measure_bf16(counts)
        except Exception:
            traceback.print_exc(limit=2)
        for name in names:
            for shape in args.shapes.split(","):
                try:
                    report["products"] += measure(name, shape, counts, scratch, workspace)
                except Exception:
                    traceback.print_exc(limit=4)
                torch.cuda.empty_cache()
            print(f"{name} done at {time.perf_counter() - began:.0f} s", flush=True)
        save(report, args.json)
        tilings = {(c["format"], c["shape"], c["rows"]): tiling_of(c) for c in report["products"]}
        for name in names:
            for count in [int(count) for count in args.step.split(",") if count]:
                try:
                    report["steps"].append(measure_step(name, count, tilings, scratch))
                except Exception as error:
                    print(f"! step {name} {count}: {error!r}"[:200], flush=True)
                torch.cuda.empty_cache()
    save(report, args.json)
    print_tables(report, counts)
    print(f"total {time.perf_counter() - began:.0f} s", flush=True)


def save(report: dict[str, Any], path: str | None) -> None:
    if path:
        Path(path).write_text(json.dumps(report))


def print_tables(report: dict[str, Any], counts: list[int]) -> None:
    print(
        "\nmicroseconds (of the limit) best tiling; few: warps,steps,tiles; many: tiles,rows,steps,split,warps,stages"
    )
    for shape, times in report.get("bf16", {}).items():
        print(f"bf16 {shape:8}" + "".join(f"  {count}:{took}" for count, took in times.items()))
    for cell in report["products"]:
        tiling = cell["tiling"] if cell["tiling"] == "library" else ",".join(map(str, cell["tiling"]))
        print(f"{cell['format']} {cell['shape']} {cell['rows']}: {cell['us']} ({100 * cell['of_limit']:.0f}%) {tiling}")
    for step in report["steps"]:
        print(f"step {step['format']} {step['rows']} rows: {step['ms']} ms ({100 * step['of_limit']:.0f}%)")


if __name__ == "__main__":
    main()

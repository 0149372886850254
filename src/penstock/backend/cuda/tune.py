"""Measures which tilings are the fastest on the present GPU: `penstock doctor --tune` keeps them (tuned_tilings.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.devices import checked_device, device_properties
from penstock.backend.cuda.kernels import gemv, quant_gemm, quant_gemm_small, skinny_gemm
from penstock.backend.cuda.kernels.expert_gemm import ExpertRows, expert_gemv
from penstock.backend.cuda.kernels.fp8 import fp8_gemm_small, quantize_fp8
from penstock.backend.cuda.kernels.fp8_activations import fp8_view, quantize_activations
from penstock.backend.cuda.kernels.fp8_gemm import fp8_gemm
from penstock.backend.cuda.kernels.split_k import MAX_PARTIALS, SplitKScratch
from penstock.backend.cuda.pack_quantized import pack, quantize_int4
from penstock.backend.cuda.quantized_tilings import block_of, gemm_stage, narrowed
from penstock.backend.cuda.tilings import skinny_stage
from penstock.backend.cuda.transfer import Transfer
from penstock.backend.cuda.tuned_tilings import Product, default_path, write_tuned
from penstock.config import available_threads
from penstock.model.random_tensor import random_tensor

log = logging.getLogger(__name__)
Call = Callable[[], None]
Seconds = Callable[[Sequence[Call]], float]
SHAPES = (  # rows and width of the matrices of models with 1 and with 8 billion weights; others are near enough
    *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
)
EXPERT_SHAPES = (  # rows and width of an expert's matrices, and whether they are gated, as up and gate are
    *((768, 2048, True), (2048, 768, False), (1408, 2048, True), (2048, 1408, False)),
    *((2048, 4096, True), (4096, 2048, False), (14336, 4096, True), (4096, 14336, False)),
)
CHOSEN = 8  # experts of the one token that they are measured with
COUNTS = {
    "gemv": (1,),
    "expert_gemv": (1,),
    "skinny": (4, 16, 32),
    "small_gemm": (4, 8, 16),
    "quant_gemm": (32, 64, 128, 256),
    "fp8_gemm": (32, 64, 128),
}
KINDS = {  # matrices of each kernel
    "gemv": ("16 bits",),
    "expert_gemv": ("16 bits", "fp8"),
    "skinny": ("16 bits",),
    "small_gemm": ("4 bits", "more bits", "fp8"),
    "quant_gemm": ("4 bits",),
    "fp8_gemm": ("fp8",),
}
MANY_BYTES = 2  # times the L2 cache: copies of a matrix take this much, so none is found there
REPEATS = 40


@dataclass(frozen=True, slots=True)
class Bench:
    """Holds the GPU, scratch memory and a clock for all measurements."""

    device: torch.device
    properties: DeviceProperties
    scratch: SplitKScratch
    seconds: Seconds


def tune(device: str = "cuda", path: Path | None = None, report: Callable[[str], None] = log.info) -> Path:
    """Measures tilings on a GPU, writes them to the file, by default the store's, and returns its path."""
    found = checked_device(device)
    properties = device_properties(found)
    path = path or default_path()
    with torch.cuda.device(found):
        measured = measure(Bench(found, properties, SplitKScratch.on(found), graph_seconds), SHAPES, report)
    write_tuned(path, properties.name, measured)
    return path


def measure(
    bench: Bench, shapes: Sequence[tuple[int, int]], report: Callable[[str], None] = log.info
) -> list[tuple[Product, tuple[int, ...]]]:
    best = []
    for product in products(bench.properties, shapes):
        if times := list(timed(bench, product)):
            took, tiling = min(times)
            best.append((product, tuple(tiling)))
            shape = f"{product.count} rows with {product.rows} x {product.width}"
            report(f"{product.kernel}, {product.kind}, {shape}: {1e6 * took:.1f} us with {tuple(tiling)}")
    return best


def products(device: DeviceProperties, shapes: Sequence[tuple[int, int]]) -> Iterator[Product]:
    for kernel, kinds in KINDS.items():
        for kind in kinds:
            if kind == "fp8" and not device.has_fp8:
                continue
            for shape in EXPERT_SHAPES if kernel == "expert_gemv" else shapes:
                for count in COUNTS[kernel]:
                    yield Product(kernel, kind, count, *shape)


def timed(bench: Bench, product: Product) -> Iterator[tuple[float, Any]]:
    first = matrix(bench, product)
    size = lines_of(product) * product.width * (1 if product.kind != "16 bits" else 2)
    more = MANY_BYTES * bench.properties.l2_bytes // size if bench.device.type == "cuda" else 0
    weights = [first, *(matrix(bench, product) for _ in range(more))]
    x = torch.randn(product.count, product.width, device=bench.device).bfloat16()
    results = CHOSEN if product.kernel == "expert_gemv" else product.count
    out = torch.empty(results, product.rows, device=bench.device, dtype=torch.bfloat16)
    trials = {
        tiling: [call_of(product, x, weight, out, tiling, bench.scratch) for weight in weights]
        for tiling in candidates(bench.properties, product)
    }
    compile_ahead(bench.device, [calls[0] for calls in trials.values()])
    for tiling, calls in trials.items():
        try:
            yield bench.seconds(calls), tiling
        except Exception as error:  # this GPU cannot run the tiling
            log.debug("%s with %s does not run: %s", product, tiling, error)


def compile_ahead(device: torch.device, calls: Sequence[Call]) -> None:
    """Makes each call once, several at a time: their kernels are compiled then. The interpreter runs one at a time."""

    def attempt(call: Call) -> None:
        with suppress(Exception), torch.cuda.device(device):  # the timed call reports errors
            call()

    if device.type == "cuda":
        with ThreadPoolExecutor(available_threads(), "penstock-tune") as threads:
            list(threads.map(attempt, calls))
        torch.cuda.synchronize(device)


def lines_of(product: Product) -> int:
    return product.rows * (2 if product.gated else 1) * (CHOSEN if product.kernel == "expert_gemv" else 1)


def matrix(bench: Bench, product: Product) -> Any:
    if product.kind == "more bits":
        tensor = random_tensor(np.random.default_rng(0), "Q8_0", product.rows, product.width)
        return pack(tensor.data, "Q8_0", product.rows, product.width, Transfer(bench.device))
    shape = lines_of(product), product.width
    values = torch.empty(shape, device=bench.device, dtype=torch.bfloat16).normal_(0, 0.02)
    return {"16 bits": lambda v: v, "4 bits": quantize_int4, "fp8": quantize_fp8}[product.kind](values)


def candidates(device: DeviceProperties, product: Product) -> list[Any]:
    count, width = product.count, product.width
    if product.kernel == "gemv":
        lanes = min(1024, 1 << (width - 1).bit_length())
        return [gemv.Tiling(lines, lanes, warps) for lines in (1, 2, 4, 8) for warps in (2, 4, 8)]
    if product.kernel == "expert_gemv":
        lanes, most = (256, 8) if product.kind == "16 bits" else (512, 4)
        cuts = [(lines, warps) for lines in (1, 2, 4, 8) for warps in (1, 2, 4) if lines <= most]
        return [gemv.Tiling(lines, warps * lanes, warps) for lines, warps in cuts]  # 64 values a thread, at most
    if product.kernel == "small_gemm":
        sizes = [(warps, steps, tiles) for warps in (2, 4, 8, 16) for steps in (1, 2, 4) for tiles in (1, 2, 4)]
        some = [quant_gemm_small.Tiling(*size) for size in sizes if size[1] * size[2] <= 4 and size[0] * size[1] >= 4]
        return list(dict.fromkeys(narrowed(tiling, width) for tiling in some))
    if product.kernel == "skinny":
        stages = range(2, 6)
        skinny = [skinny_gemm.Tiling(64, 128, split, 4, n) for split in splits(device, product, 64, 64) for n in stages]
        return [each for each in skinny if each.stages * skinny_stage(each, count, 2) <= device.shared_memory]
    itemsize, block = (1 if product.kernel == "fp8_gemm" else 2), block_of(count)
    block = max(block, 64) if product.kernel == "quant_gemm" else block
    sizes = [(4, 1, 4), (4, 2, 4), (8, 1, 4), (8, 1, 8), (8, 2, 8)]
    gemm = [
        quant_gemm.Tiling(tiles, block, steps, split, warps, stages)
        for tiles, steps, warps in sizes
        for split in splits(device, product, 16 * tiles, block)
        for stages in (2, 3, 4)
    ]
    return [each for each in gemm if each.stages * gemm_stage(each, itemsize) <= device.shared_memory]


def splits(device: DeviceProperties, product: Product, tile: int, block: int) -> list[int]:
    """Returns the splits that fill the GPU about once, twice and four times, as far as scratch memory goes."""
    programs = -(-product.rows // tile) * -(-product.count // block)
    most = max(min(8, product.width // 512, MAX_PARTIALS // (product.count * product.rows)), 1)
    wanted = [min(fill * device.sm_count // programs, most) for fill in (1, 2, 4)]
    return sorted({1 << (max(each, 1).bit_length() - 1) for each in wanted})


def call_of(product: Product, x: Any, weight: Any, out: Any, tiling: Any, scratch: SplitKScratch) -> Call:
    if product.kernel == "gemv":
        return lambda: gemv.gemv(x, weight, None, out, tiling=tiling)
    if product.kernel == "expert_gemv":
        rows = ExpertRows(x, torch.arange(CHOSEN, dtype=torch.int32, device=x.device), CHOSEN)
        values, scales = (weight.values, weight.scales) if product.kind == "fp8" else (weight, None)
        return lambda: expert_gemv(rows, values, None, out, product.gated, scales, tiling=tiling)
    if product.kernel == "skinny":
        return lambda: skinny_gemm.skinny_gemm(x, weight, None, out, tiling, scratch)
    if product.kernel == "small_gemm":
        kernel = fp8_gemm_small if product.kind == "fp8" else quant_gemm_small.quant_gemm_small
        return lambda: kernel(x, weight, None, out, tiling=tiling)
    if product.kernel == "quant_gemm":
        return lambda: quant_gemm.quant_gemm(x, weight, None, out, tiling, scratch)
    quantized = fp8_view(torch.empty_like(x))
    quantize_activations(x, *quantized)
    return lambda: fp8_gemm(*quantized, weight, None, out, tiling, scratch)


def graph_seconds(calls: Sequence[Call]) -> float:
    """Returns the seconds of one call, when all are made in turn in a CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = max(-(-REPEATS // len(calls)), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * repeats:
            call()
    times: list[float] = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (repeats * len(calls)))
    return min(times[1:])

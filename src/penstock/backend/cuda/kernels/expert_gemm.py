"""Products of rows with the matrices of their experts, which lie below each other in one.

Few rows: one program for each token-expert pair reads a part of that expert's matrix (GEMV). Many: pairs are permuted
(expert_routing.py), and a program multiplies a block of them with a part of their expert's matrix on the tensor cores.

Values of FP8 (e4m3) are widened as they are read, and activations stay as they are. Their scales are one for each row,
which multiplies its sums, or one for every 128 columns of a row (fp8_blocks.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.device_properties import INTERPRETER, DeviceProperties
from penstock.backend.cuda.kernels.expert_routing import ExpertPermutation, most_blocks
from penstock.backend.cuda.kernels.fp8_blocks import COLUMNS
from penstock.backend.cuda.kernels.gemm_config import Epilogue, GemmConfig
from penstock.backend.cuda.kernels.gemv import Tiling as GemvTiling
from penstock.backend.cuda.kernels.gemv import store_row
from penstock.backend.cuda.kernels.interpreter import dot_bfloat16
from penstock.backend.cuda.kernels.mma_fragments import axis, format_of, load_tiles, matrix_of, values_of
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.quant_gemm_small import (
    Tiling,
    add_tiles,
    finish,
    load_rows,
    tile_rows,
    zeros_for,
)
from penstock.backend.cuda.pack_quantized import QuantizedWeight

BLOCK_SCALED = GemvTiling(16, COLUMNS, 4)  # its width is the 128 columns of a scale
ROW_SCALES, BLOCK_SCALES = tl.constexpr(1), tl.constexpr(2)  # what scales there are: their number of dimensions
SCALED_COLUMNS = tl.constexpr(COLUMNS)
WARPS, STEPS, TILES = 4, 2, 1  # quantized matrices: see quant_gemm_small.py
QUANT_TILES, QUANT_STAGES = 4, 3  # quantized matrices, blocks of pairs


class ExpertRows(NamedTuple):
    """Names the rows that are multiplied. Each row of x has `each` pairs, one after the other: with several experts, or
    with one."""

    x: Any  # [rows, width]
    experts: Any  # [pairs]
    each: int


class ScaledMatrix(NamedTuple):
    """Holds the matrices of all experts as kernels take them."""

    data: Any  # [lines, width]
    scales: Any  # FP8: [lines] or [width / 128, lines]
    lines: int  # rows of all experts


def scaled_matrix(weight: Any, scales: Any | None) -> ScaledMatrix:
    return ScaledMatrix(weight, weight if scales is None else scales, len(weight))


def scale_kind(scales: Any | None) -> int:
    return 0 if scales is None else int(scales.dim())


@triton.jit
def load_scales(matrix, line, first, there, SCALES: tl.constexpr):
    at = matrix.scales + line
    if SCALES == BLOCK_SCALES:
        at += first // SCALED_COLUMNS * matrix.lines
    return tl.load(at, there, 0.0)[:, None]


@triton.jit
def load_lines(matrix, line, first, column, there, width, SCALES: tl.constexpr):
    at = first + column
    inside = there[:, None] & (at < width)[None, :]
    values = tl.load(matrix.data + line[:, None] * width + at[None, :], inside, 0.0).to(tl.float32)
    if SCALES == BLOCK_SCALES:
        values *= load_scales(matrix, line, first, there, SCALES)
    return values


@triton.jit
def _expert_gemv(
    x,
    matrix,
    bias,
    out,
    experts,
    each,
    rows,
    width,
    EPILOGUE: tl.constexpr,
    TILING: tl.constexpr,
    SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    ROWS: tl.constexpr = TILING.rows
    WIDTH: tl.constexpr = TILING.width
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    wait_for_previous(PDL)
    line = tl.load(experts + pair).to(tl.int64) * (2 * rows if EPILOGUE.gated else rows) + row
    x += (pair // each).to(tl.int64) * width
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    other = total  # sums of the rows that these gate
    for start in range(0, width, WIDTH):
        at = start + column
        value = tl.load(x + at, at < width, 0.0).to(tl.float32)[None, :]
        total += load_lines(matrix, line, start, column, row < rows, width, SCALES) * value
        if EPILOGUE.gated:
            other += load_lines(matrix, line + rows, start, column, row < rows, width, SCALES) * value
    if SCALES == ROW_SCALES:
        total *= load_scales(matrix, line, 0, row < rows, SCALES)
        if EPILOGUE.gated:
            other *= load_scales(matrix, line + rows, 0, row < rows, SCALES)
    store_row(tl.sum(total, 1), other, bias, row, rows, out + pair.to(tl.int64) * rows, line, EPILOGUE)


def expert_gemv(
    rows: ExpertRows,
    weight: Any,
    bias: Any | None,
    out: Any,
    gated: bool,
    scales: Any | None = None,
    *,
    tiling: GemvTiling,
) -> None:
    """Computes out [pairs, rows of an expert] from weight [experts * rows, width]. Gated: silu of the first half of an
    expert's rows times the second, so out is half as wide. FP8 has scales: see ScaledMatrix."""
    lines, width, kind = out.shape[1], weight.shape[1], scale_kind(scales)
    tiling = BLOCK_SCALED if kind == BLOCK_SCALES.value else tiling
    _expert_gemv[(triton.cdiv(lines, tiling.rows), len(out))](
        rows.x,
        scaled_matrix(weight, scales),
        weight if bias is None else bias,
        out,
        rows.experts,
        rows.each,
        lines,
        width,
        EPILOGUE=Epilogue(gated, bias is not None),
        TILING=tiling,
        SCALES=kind,
        **launch_options(tiling.warps),
    )


@triton.jit
def lines_of(rows, R: tl.constexpr, GATED: tl.constexpr):
    """Returns which lines of an expert's matrix a program's sums are: see `tile_rows`."""
    i = tl.arange(0, 16 * R)
    if GATED:
        return i // (8 * R) * (rows // 2) + tl.program_id(0) * (8 * R) + i % (8 * R)
    else:
        return tl.program_id(0) * (16 * R) + i


@triton.jit
def times_factors(total, factors, expert, line, rows):
    return total * tl.load(factors + expert.to(tl.int64) * rows + line, line < rows, 0.0)[:, None]


@triton.jit
def _quant_expert_gemv(
    x, matrix, bias, factors, out, experts, each, CONFIG: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    FORMAT: tl.constexpr = CONFIG.format
    TILING: tl.constexpr = CONFIG.tiling
    W: tl.constexpr = TILING.warps
    G: tl.constexpr = TILING.steps
    rows, width = matrix.rows, matrix.width
    pair = tl.program_id(1)
    wait_for_previous(PDL)
    expert = tl.load(experts + pair)
    row = expert * (rows // 16) + tile_rows(rows, TILING.tiles, CONFIG.epilogue.gated)
    x += (pair // each).to(tl.int64) * width
    total = zeros_for(FORMAT, TILING, 4)
    for column in range(0, matrix.tiles, W * G):
        tiles = load_tiles(matrix, row, column, W, G, G, CONFIG.even, FORMAT)
        items = load_rows(x, width, column, 1, width, TILING, 4, CONFIG.even)
        total = add_tiles(total, tiles, items, matrix.base, FORMAT, TILING, 4)
    out += pair.to(tl.int64) * (rows // 2 if CONFIG.epilogue.gated else rows)
    y = tl.sum(total, 0) * matrix.factor
    if SCALED:
        y = times_factors(y, factors, expert, lines_of(rows, TILING.tiles, CONFIG.epilogue.gated), rows)
    finish(y, bias + expert.to(tl.int64) * rows, out, 1, rows, 0, 4, CONFIG)


def quant_expert_gemv(
    rows: ExpertRows, weight: QuantizedWeight, bias: Any | None, out: Any, gated: bool, factors: Any | None = None
) -> None:
    """Computes what `expert_gemv` does, from quantized matrices. `factors` [experts * rows] multiply products."""
    across = 1 << (weight.tiles - 1).bit_length()
    warps = min(WARPS, across)
    tiling = Tiling(warps, min(STEPS, max(across // warps, 1)), 2 * TILES if gated else TILES)
    even = weight.width % (64 * warps * tiling.steps) == 0
    config = GemmConfig(tiling, Epilogue(gated, bias is not None), even, format_of(weight))
    matrix = matrix_of(weight, 2 * out.shape[1] if gated else out.shape[1])
    vectors = (weight.scales if one is None else one for one in (bias, factors))
    grid = (triton.cdiv(out.shape[1], 16 * TILES), len(out))
    _quant_expert_gemv[grid](
        rows.x,
        matrix,
        *vectors,
        out,
        rows.experts,
        rows.each,
        CONFIG=config,
        SCALED=factors is not None,
        **launch_options(warps, 1),
    )


@triton.jit
def block_of(permutation, N: tl.constexpr):
    entry = permutation.blocks + tl.program_id(1) * 3
    item = tl.arange(0, N)
    there = item < tl.load(entry + 2)
    pair = tl.load(permutation.pairs + tl.load(entry + 1) + item, there, 0)
    return tl.load(entry), pair, there


@triton.jit
def store_block(total, line, expert, pair, there, rows, bias, out, BIAS: tl.constexpr):
    if BIAS:
        total += tl.load(bias + expert.to(tl.int64) * rows + line, line < rows, 0.0)[:, None]
    place = pair.to(tl.int64)[None, :] * rows + line[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), (line < rows)[:, None] & there[None, :])


@triton.jit(do_not_specialize=["each"])
def _expert_gemm(
    x,
    matrix,
    bias,
    out,
    permutation,
    each,
    rows,
    width,
    CONFIG: tl.constexpr,
    COUNT: tl.constexpr,
    SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    ROWS: tl.constexpr = CONFIG.tiling.rows
    WIDTH: tl.constexpr = CONFIG.tiling.width
    N: tl.constexpr = CONFIG.columns
    EVEN: tl.constexpr = CONFIG.even
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    wait_for_previous(PDL)
    if tl.program_id(1) >= tl.load(permutation.counts + COUNT):
        return
    expert, pair, there = block_of(permutation, N)
    line = expert.to(tl.int64) * rows + row
    token = (pair // each).to(tl.int64)
    total = tl.zeros([ROWS, N], tl.float32)
    for start in tl.range(0, width, WIDTH):
        at = start + column
        inside = (row < rows)[:, None] if EVEN else (row < rows)[:, None] & (at < width)[None, :]
        items = there[None, :] if EVEN else there[None, :] & (at < width)[:, None]
        values = tl.load(x + token[None, :] * width + at[:, None], items, 0.0)
        lines = tl.load(matrix.data + line[:, None] * width + at[None, :], inside, 0.0).to(values.dtype)
        if SCALES == BLOCK_SCALES:
            product = tl.dot(lines, values, input_precision="ieee")
            total += product * load_scales(matrix, line, start, row < rows, SCALES)
        else:
            total = tl.dot(lines, values, total, input_precision="ieee")
    if SCALES == ROW_SCALES:
        total *= load_scales(matrix, line, 0, row < rows, SCALES)
    store_block(total, row, expert, pair, there, rows, bias, out, CONFIG.epilogue.bias)


class BlockTiling(NamedTuple):
    """Says how a block of pairs is multiplied with a matrix of plain values or FP8."""

    rows: int  # per program
    width: int  # columns at a time
    warps: int
    stages: int


def block_tiling(device: DeviceProperties, size: int, itemsize: int) -> BlockTiling:
    """Returns the tiling for blocks of `size` pairs. It is at most as wide as a scale's columns."""
    rows, width = 64 if size <= 32 else 128, 256 // itemsize // (2 if size >= 64 else 1)
    stages = device.stages_that_fit(4 if itemsize == 2 else 2, (rows + size) * width * itemsize)
    return BlockTiling(rows, width, 4 if size <= 64 else 8, stages)


def expert_gemm(
    rows: ExpertRows,
    permutation: ExpertPermutation,
    size: int,
    weight: Any,
    bias: Any | None,
    out: Any,
    device: DeviceProperties = INTERPRETER,
    scales: Any | None = None,
) -> None:
    """Computes out [pairs, rows of an expert] by blocks of up to `size` pairs of one expert. FP8 has scales: see
    ScaledMatrix."""
    lines, width, count = out.shape[1], weight.shape[1], len(permutation.counts) - 1
    tall, step, warps, stages = block_tiling(device, size, rows.x.element_size())
    epilogue = Epilogue(bias=bias is not None)
    config = GemmConfig(GemvTiling(tall, step, warps), epilogue, width % step == 0, columns=size)
    matrix, vector = scaled_matrix(weight, scales), weight if bias is None else bias
    grid = (triton.cdiv(lines, tall), most_blocks(len(out), count, size))
    about = {"CONFIG": config, "COUNT": count, "SCALES": scale_kind(scales)}
    _expert_gemm[grid](
        rows.x, matrix, vector, out, permutation, rows.each, lines, width, **about, **launch_options(warps, stages)
    )


@triton.jit(do_not_specialize=["each"])
def _quant_expert_gemm(
    x,
    matrix,
    bias,
    factors,
    out,
    permutation,
    each,
    CONFIG: tl.constexpr,
    COUNT: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    FORMAT: tl.constexpr = CONFIG.format
    R: tl.constexpr = CONFIG.tiling.tiles
    N: tl.constexpr = CONFIG.columns
    rows, width = matrix.rows, matrix.width
    first = tl.program_id(0)
    column = tl.arange(0, 64)
    wait_for_previous(PDL)
    if tl.program_id(1) >= tl.load(permutation.counts + COUNT):
        return
    expert, pair, there = block_of(permutation, N)
    row = expert * (rows // 16) + tl.minimum(first * R + axis(R, 2), rows // 16 - 1)
    token = (pair // each).to(tl.int64)
    total = tl.zeros([16 * R, N], tl.float32)
    for tile in tl.range(0, matrix.tiles, 1, num_stages=CONFIG.tiling.stages):
        loaded = load_tiles(matrix, row, tile, R, 1, 0, True, FORMAT)
        inside = there[:, None]
        if not CONFIG.even:
            inside = inside & (tile * 64 + column < width)[None, :]
        items = tl.load(x + token[:, None] * width + (tile * 64 + column)[None, :], inside, 0.0)
        total = dot_bfloat16(values_of(loaded, matrix.base, R, 1, FORMAT), tl.trans(items), total)
    line = first * (16 * R) + tl.arange(0, 16 * R)
    total *= matrix.factor
    if SCALED:
        total = times_factors(total, factors, expert, line, rows)
    store_block(total, line, expert, pair, there, rows, bias, out, CONFIG.epilogue.bias)


def quant_expert_gemm(
    rows: ExpertRows,
    permutation: ExpertPermutation,
    size: int,
    weight: QuantizedWeight,
    bias: Any | None,
    out: Any,
    factors: Any | None = None,
) -> None:
    """Computes what `expert_gemm` does, from quantized matrices. `factors` [experts * rows] multiply products."""
    lines, count = out.shape[1], len(permutation.counts) - 1
    tiling = Tiling(4, 1, QUANT_TILES, QUANT_STAGES)
    epilogue = Epilogue(bias=bias is not None)
    config = GemmConfig(tiling, epilogue, weight.width % 64 == 0, format_of(weight), size)
    vectors = (weight.scales if one is None else one for one in (bias, factors))
    grid = (triton.cdiv(lines, 16 * QUANT_TILES), most_blocks(len(out), count, size))
    options = launch_options(tiling.warps, tiling.stages, early=False)
    _quant_expert_gemm[grid](
        rows.x,
        matrix_of(weight, lines),
        *vectors,
        out,
        permutation,
        rows.each,
        CONFIG=config,
        COUNT=count,
        SCALED=factors is not None,
        **options,
    )

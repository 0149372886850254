"""GEMM with FP8 (e4m3) matrices: each row of values, and each row of activations, has one scale.

Up to 16 rows are multiplied in bfloat16 as they are, at the speed the matrix can be read: lane 4 * g + t of a warp has
16 values that lie together, in rows g and g + 8, and the rows' values in the same order. The exponent of FP8 becomes
the exponent of bfloat16 without its bias, which makes values 2 ** 120 times too small; the rows' values are made
2 ** 100 times larger, and the sums 2 ** 20 times at the end. More rows are quantized first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.fp8_activations import LARGEST
from penstock.backend.cuda.kernels.gemm_config import Epilogue, GemmConfig
from penstock.backend.cuda.kernels.interpreter import INTERPRETED
from penstock.backend.cuda.kernels.mma_fragments import axis, halves
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.quant_gemm_small import (
    DEFAULT,
    Tiling,
    finish,
    programs_for,
    tile_rows,
)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix of FP8 with a scale for each row."""

    values: Any  # [rows, width] float8_e4m3fn
    scales: Any  # [rows] float32

    @property
    def rows(self) -> int:
        return int(self.values.shape[0])

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    @property
    def bytes(self) -> int:
        return self.rows * (self.width + 4)


def fp8_room(rows: int) -> int:
    """Returns how many rows a weight has memory for, whole tiles of 16: kernels read all of the last one."""
    return -(-rows // 16) * 16


def empty_fp8(rows: int, width: int, device: Any) -> Fp8Weight:
    values = torch.empty((fp8_room(rows), width), dtype=torch.float8_e4m3fn, device=device)
    return Fp8Weight(values[:rows], torch.empty(fp8_room(rows), device=device)[:rows])


def quantize_fp8(values: Any) -> Fp8Weight:
    """Quantizes values [rows, width] where they are, some rows at a time. Host and device give the same bits, which a
    division by a number would not: a GPU multiplies by its inverse instead."""
    weight = empty_fp8(len(values), values.shape[1], values.device)
    for first in range(0, len(values), 1024):
        some = values[first : first + 1024].float()
        scale = some.abs().amax(1).clamp(min=1e-12) * (1 / LARGEST)
        weight.values[first : first + 1024] = (some / scale[:, None]).to(torch.float8_e4m3fn)
        weight.scales[first : first + 1024] = scale
    return weight


@triton.jit
def bfloat16_of(words):
    """Returns the four FP8 of each word as bfloat16, 2 ** 120 times smaller: [...] -> [..., b, e] of byte 2 * e + b."""
    even = (((words << 8) & 0x7F007F00) >> 4) | ((words << 8) & 0x80008000)
    odd = ((words & 0x7F007F00) >> 4) | (words & 0x80008000)
    return halves(tl.join(even, odd))


@triton.jit
def load_values(values, row, column, tiles, TILING: tl.constexpr, EVEN: tl.constexpr):
    """Returns 16 bytes of each of a lane's rows: words of [t, g, W, G, (R, half), 4]."""
    W: tl.constexpr = TILING.warps
    G: tl.constexpr = TILING.steps
    R: tl.constexpr = TILING.tiles
    row = tl.broadcast_to(tl.reshape(row, [1, 1, 1, 1, R, 1, 1]), [1, 1, 1, 1, R, 2, 1])
    row = tl.reshape(row, [1, 1, 1, 1, 2 * R, 1]) * 16 + axis(2 * R, 4) % 2 * 8 + axis(8, 1)
    at = values + column * 16 + row.to(tl.int64) * (tiles * 16) + axis(4, 0) * 4 + axis(W, 2) * (G * 16)
    at = at + axis(G, 3) * 16 + axis(4, 5)
    words = tl.load(at) if EVEN else tl.load(at, column + axis(W, 2) * G + axis(G, 3) < tiles, 0)
    return words.to(tl.uint32, bitcast=True)


@triton.jit
def load_items(x, stride, column, count, tiles, TILING: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Returns 16 values of each of the rows that a lane takes, 2 ** 100 times larger: words of [t, g, W, G, n, 8]."""
    W: tl.constexpr = TILING.warps
    G: tl.constexpr = TILING.steps
    item = axis(COLUMNS // 8, 4) * 8 + axis(8, 1)
    at = x + column * 32 + item * stride + axis(4, 0) * 8 + axis(W, 2) * (G * 32) + axis(G, 3) * 32 + axis(4, 5)
    inside = item < count
    if not EVEN:
        inside = inside & (column + axis(W, 2) * G + axis(G, 3) < tiles)
    both = tl.join(tl.load(at, inside, 0), tl.load(at + 4, inside, 0))
    both = tl.reshape(tl.permute(both, [0, 1, 2, 3, 4, 6, 5]), [4, 8, W, G, COLUMNS // 8, 8])
    return (both + 0x32003200).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["count"])
def _fp8_gemm_small(
    x, values, scales, bias, out, count, rows, tiles, x_stride, out_stride, CONFIG: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    COLUMNS: tl.constexpr = CONFIG.columns
    TILING: tl.constexpr = CONFIG.tiling
    W: tl.constexpr = TILING.warps
    R: tl.constexpr = TILING.tiles
    G: tl.constexpr = TILING.steps
    row = tile_rows(rows, R, CONFIG.epilogue.gated)
    total = tl.zeros([G * W, 16 * R, COLUMNS], tl.float32)
    words = load_values(values, row, 0, tiles, TILING, CONFIG.even)
    wait_for_previous(PDL)
    for column in range(0, tiles, W * G):
        items = load_items(x, x_stride, column, count, tiles, TILING, COLUMNS, CONFIG.even)
        next_words = load_values(values, row, column + W * G, tiles, TILING, False)
        #           [t, g, W, G, R, half, word, word, b, e] to [G, W | R, half, g | word, word, t, b, e]
        a = tl.reshape(bfloat16_of(words), [4, 8, W, G, R, 2, 2, 2, 2, 2])
        a = tl.reshape(tl.permute(a, [3, 2, 4, 5, 1, 6, 7, 0, 8, 9]), [G * W, 16 * R, 64])
        #           [t, g, W, G, n, word, word, e, b] to [G, W | word, word, t, b, e | n, g]
        b = tl.reshape(halves(items), [4, 8, W, G, COLUMNS // 8, 2, 2, 2, 2])
        b = tl.reshape(tl.permute(b, [3, 2, 5, 6, 0, 8, 7, 4, 1]), [G * W, 64, COLUMNS])
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total) if INTERPRETED else tl.dot(a, b, total)
        words = next_words
    line = tl.reshape(tl.broadcast_to(tl.reshape(row, [R, 1]) * 16 + tl.arange(0, 16)[None, :], [R, 16]), [16 * R, 1])
    y = tl.sum(total, 0) * (tl.load(scales + line) * 1048576.0)
    finish(y, bias, out, count, rows, out_stride, COLUMNS, CONFIG)


def fp8_gemm_small(
    x: Any, weight: Fp8Weight, bias: Any | None, out: Any, *, gated: bool = False, tiling: Tiling = DEFAULT
) -> None:
    """Computes out [T, rows] = x [T, width] @ weight.T (+ bias) for up to 16 rows of bfloat16; gated as in
    quant_gemm_small.py."""
    even = weight.width % (64 * tiling.warps * tiling.steps) == 0
    config = GemmConfig(tiling, Epilogue(gated, bias is not None), even, columns=8 if len(x) <= 8 else 16)
    vector, grid = weight.scales if bias is None else bias, (programs_for(out.shape[1], tiling, gated),)
    options = launch_options(tiling.warps, tiling.stages)
    _fp8_gemm_small[grid](
        x.view(torch.int32),
        weight.values.view(torch.int32),
        weight.scales,
        vector,
        out,
        len(x),
        weight.rows,
        weight.width // 64,
        x.stride(0) // 2,
        out.stride(0),
        CONFIG=config,
        **options,
    )


def cublas_fp8_gemm(codes: Any, scales: Any, weight: Fp8Weight, bias: Any | None, out: Any) -> None:
    """Computes out [T, rows] in bfloat16 with cuBLAS, from rows that are quantized already. Compared with the codes'
    rounding, the tensor cores' own sums are exact enough, and a tenth faster than sums that leave them every 128
    columns."""
    torch._scaled_mm(
        codes,
        weight.values.t(),
        scale_a=scales[:, None],
        scale_b=weight.scales[None, :],
        out_dtype=out.dtype,
        out=out,
        use_fast_accum=True,
    )
    if bias is not None:
        out += bias


@triton.jit
def _gather_fp8(tokens, values, scales, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    item = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    row = tl.load(tokens + item).to(tl.int64)
    line = tl.load(values + row * width + column, column < width, 0.0).to(tl.float32) * tl.load(scales + row)
    tl.store(out + item * width + column, line.to(out.dtype.element_ty), column < width)


def gather_fp8(weight: Fp8Weight, tokens: Any, out: Any) -> None:
    block = min(triton.next_power_of_2(weight.width), 1024)
    grid = (len(tokens), triton.cdiv(weight.width, block))
    _gather_fp8[grid](tokens, weight.values, weight.scales, out, weight.width, BLOCK=block, **launch_options())

"""Dequantizes quantized matrices: all of one, or some of its rows."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.mma_fragments import axis, format_of, load_tiles, matrix_of, values_of
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.pack_quantized import QuantizedWeight


@triton.jit
def _dequantize_matrix(matrix, out, FORMAT: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    rows, width = matrix.rows, matrix.width
    first = tl.program_id(0) * T
    row = tl.minimum(tl.program_id(1) * R + axis(R, 2), tl.cdiv(rows, 16) - 1)
    tiles = load_tiles(matrix, row, first, R, T, 0, False, FORMAT)
    values = values_of(tiles, matrix.base, R, T, FORMAT) * matrix.factor
    line = tl.program_id(1) * (16 * R) + tl.arange(0, 16 * R)[:, None]
    column = first * 64 + tl.arange(0, 64 * T)[None, :]
    wait_for_previous(PDL)
    tl.store(
        out + line.to(tl.int64) * width + column, values.to(out.dtype.element_ty), (line < rows) & (column < width)
    )


@triton.jit
def _dequantize_rows(tokens, matrix, out, FORMAT: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    width = matrix.width
    first = tl.program_id(0) * T
    item = tl.program_id(1)
    wait_for_previous(PDL)
    token = tl.load(tokens + item)
    row = token // 16 + axis(1, 2)
    tiles = load_tiles(matrix, row, first, 1, T, 0, False, FORMAT)
    values = values_of(tiles, matrix.base, 1, T, FORMAT) * matrix.factor
    mine = tl.arange(0, 16)[:, None] == token % 16
    line = tl.sum(tl.where(mine, values, 0.0), 0)
    column = first * 64 + tl.arange(0, 64 * T)
    tl.store(out + item.to(tl.int64) * width + column, line.to(out.dtype.element_ty), column < width)


def dequantize_matrix(weight: QuantizedWeight, out: Any) -> None:
    grid = (triton.cdiv(weight.tiles, 4), triton.cdiv(weight.rows, 64))
    _dequantize_matrix[grid](matrix_of(weight), out, FORMAT=format_of(weight), R=4, T=4, **launch_options(4))


def dequantize_rows(weight: QuantizedWeight, tokens: Any, out: Any) -> None:
    """Writes row tokens[i] of a matrix to out[i]."""
    grid = (triton.cdiv(weight.tiles, 4), len(tokens))
    _dequantize_rows[grid](tokens, matrix_of(weight), out, FORMAT=format_of(weight), T=4, **launch_options(1))

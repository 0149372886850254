"""Quantized matrices as plain values: all of one, or some of its rows."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.mma_fragments import (
    BASE,
    affine_of,
    arrays,
    axis,
    codes_of,
    facts,
    load_tiles,
    values_of,
)
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.pack_quantized import QuantizedWeight


@triton.jit
def _dequantize_matrix(
    low,
    high,
    scales,
    supers,
    out,
    rows,
    tiles,
    width,
    base,
    HIGH: tl.constexpr,
    GROUPS: tl.constexpr,
    MINIMA: tl.constexpr,
    SUPER: tl.constexpr,
    BFLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    SHIFTED: tl.constexpr,
    TABLE: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * T
    row = tl.minimum(tl.program_id(1) * R + axis(R, 2), tl.cdiv(rows, 16) - 1)
    words, more, factors, outer = load_tiles(
        low, high, scales, supers, row, first, tiles, R, T, 0, False, HIGH, GROUPS, MINIMA, SUPER
    )
    scale, minimum = affine_of(factors, outer, R, T, 1, GROUPS, MINIMA, SUPER, ZERO, BFLOAT)
    values = values_of(codes_of(words, more, base, HIGH, R, T, 1, TABLE), scale, minimum, R, T, GROUPS, SHIFTED)
    line = tl.program_id(1) * (16 * R) + tl.arange(0, 16 * R)[:, None]
    column = first * 64 + tl.arange(0, 64 * T)[None, :]
    if PDL:
        gdc_wait()
    tl.store(
        out + line.to(tl.int64) * width + column, values.to(out.dtype.element_ty), (line < rows) & (column < width)
    )


@triton.jit
def _dequantize_rows(
    tokens,
    low,
    high,
    scales,
    supers,
    out,
    tiles,
    width,
    base,
    HIGH: tl.constexpr,
    GROUPS: tl.constexpr,
    MINIMA: tl.constexpr,
    SUPER: tl.constexpr,
    BFLOAT: tl.constexpr,
    ZERO: tl.constexpr,
    SHIFTED: tl.constexpr,
    TABLE: tl.constexpr,
    T: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * T
    item = tl.program_id(1)
    if PDL:
        gdc_wait()
    token = tl.load(tokens + item)
    row = token // 16 + axis(1, 2)
    words, more, factors, outer = load_tiles(
        low, high, scales, supers, row, first, tiles, 1, T, 0, False, HIGH, GROUPS, MINIMA, SUPER
    )
    scale, minimum = affine_of(factors, outer, 1, T, 1, GROUPS, MINIMA, SUPER, ZERO, BFLOAT)
    values = values_of(codes_of(words, more, base, HIGH, 1, T, 1, TABLE), scale, minimum, 1, T, GROUPS, SHIFTED)
    mine = tl.arange(0, 16)[:, None] == token % 16
    line = tl.sum(tl.where(mine, values, 0.0), 0)
    column = first * 64 + tl.arange(0, 64 * T)
    tl.store(out + item.to(tl.int64) * width + column, line.to(out.dtype.element_ty), column < width)


def dequantize_matrix(weight: QuantizedWeight, out: Any) -> None:
    """out [rows, width]: every value."""
    grid = (triton.cdiv(weight.tiles, 4), triton.cdiv(weight.rows, 64))
    _dequantize_matrix[grid](
        *arrays(weight),
        out,
        weight.rows,
        weight.tiles,
        weight.width,
        BASE,
        **facts(weight),
        R=4,
        T=4,
        **options(4),
    )


def dequantize_rows(weight: QuantizedWeight, tokens: Any, out: Any) -> None:
    """out[i] = weight[tokens[i]]."""
    _dequantize_rows[(triton.cdiv(weight.tiles, 4), len(tokens))](
        tokens, *arrays(weight), out, weight.tiles, weight.width, BASE, **facts(weight), T=4, **options(1)
    )

"""Rows of activations in FP8 (e4m3), each with a scale that makes its largest value FP8's largest."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous

LARGEST = 448.0


class Fp8Activations(NamedTuple):
    """Rows of activations as FP8 values with a scale for each row."""

    values: Any  # [T, width] float8_e4m3fn
    scales: Any  # [T] float32


def fp8_view(rows: Any) -> Fp8Activations:
    """Returns FP8 activations in the memory where the rows themselves, of 16 bits, would be."""
    count, width = rows.shape
    room = rows.view(torch.uint8).view(-1)
    values = room[: count * width].view(torch.float8_e4m3fn).view(count, width)
    return Fp8Activations(values, room[count * width :][: 4 * count].view(torch.float32))


@triton.jit
def store_fp8(values, to, scale_at, inside):
    """Stores one row, which a program has as a whole, in FP8, and its scale."""
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / 448.0
    tl.store(scale_at, scale)
    tl.store(to, (values / scale).to(tl.float8e4nv), inside)


@triton.jit
def store_activations(values, to, scale_at, inside, FP8: tl.constexpr):
    if FP8:
        store_fp8(values, to, scale_at, inside)
    else:
        tl.store(to, values.to(to.dtype.element_ty), inside)


@triton.jit
def _quantize_activations(x, values, scales, width, stride, WIDTH: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    wait_for_previous(PDL)
    loaded = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
    store_fp8(loaded, values + row * width + column, scales + row, inside)


def quantize_activations(x: Any, values: Any, scales: Any) -> None:
    """Quantizes x [T, width] to FP8 values [T, width] and scales [T]."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    options = launch_options(max(block // 1024, 4))
    _quantize_activations[(rows,)](x, values, scales, width, x.stride(0), WIDTH=block, **options)

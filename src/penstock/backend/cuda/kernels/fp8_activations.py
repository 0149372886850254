"""Rows of activations in float8 (e4m3), each with a scale that makes its largest value float8's largest."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options

LARGEST = 448.0


class Fp8Activations(NamedTuple):
    values: Any  # [T, width] float8_e4m3fn
    scales: Any  # [T] float32


def fp8_view(rows: Any) -> Fp8Activations:
    """ThresholdScratch for the codes of rows where the rows themselves, of 16 bits, would be."""
    count, width = rows.shape
    room = rows.view(torch.uint8).view(-1)
    values = room[: count * width].view(torch.float8_e4m3fn).view(count, width)
    return Fp8Activations(values, room[count * width :][: 4 * count].view(torch.float32))


@triton.jit
def store_fp8(values, codes, scale_at, inside):
    """Of one row that a program has as a whole."""
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / 448.0
    tl.store(scale_at, scale)
    tl.store(codes, (values / scale).to(tl.float8e4nv), inside)


@triton.jit
def _quantize_activations(x, codes, scales, width, stride, WIDTH: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    if PDL:
        gdc_wait()
    values = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
    store_fp8(values, codes + row * width + column, scales + row, inside)


def quantize_activations(x: Any, codes: Any, scales: Any) -> None:
    """x [T, width] to codes [T, width] in float8 and scales [T]."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _quantize_activations[(rows,)](x, codes, scales, width, x.stride(0), WIDTH=block, **options(max(block // 1024, 4)))

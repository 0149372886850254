"""Residual add and RMS norm in one pass over a row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, store_fp8
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options


@triton.jit
def _add_norm(
    x,
    residual,
    gain,
    out,
    total,
    scales,
    dim,
    eps,
    ADD: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    inside = column < dim
    scale = tl.load(gain + column, inside, 0.0)
    row = tl.program_id(0).to(tl.int64)
    place = row * dim + column
    if PDL:
        gdc_wait()
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + place, inside, 0.0).to(tl.float32)
        tl.store(total + place, value.to(total.dtype.element_ty), inside)
    mean_square = tl.sum(value * value) / dim
    normed = value * (1.0 / tl.sqrt(mean_square + eps)) * scale
    if CODES:
        store_fp8(normed, out + place, scales + row, inside)
    else:
        tl.store(out + place, normed.to(out.dtype.element_ty), inside)


def add_norm(
    x: Any,
    residual: Any | None,
    gain: Any,
    eps: float,
    out: Any,
    total: Any | None,
    codes: Fp8Activations | None = None,
) -> None:
    """total = x + residual; out = rms_norm(total) * gain. Without a residual, `total` is x itself: [T, dim]. With
    `codes`, the rows go there, in float8, instead of to `out`."""
    rows, dim = x.shape
    block = triton.next_power_of_2(dim)
    _add_norm[(rows,)](
        x,
        x if residual is None else residual,
        gain,
        codes.values if codes else out,
        x if total is None else total,
        codes.scales if codes else out,
        dim,
        eps,
        ADD=residual is not None,
        CODES=codes is not None,
        BLOCK=block,
        **options(num_warps=min(max(block // 512, 1), 16)),
    )

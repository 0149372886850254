"""Residual add and norm in one pass over a row: RMS norm or layer norm."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, store_activations
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous


@triton.jit
def _add_norm(
    x,
    residual,
    gain,
    bias,
    out,
    total,
    scales,
    dim,
    eps,
    LAYER: tl.constexpr,
    ADD: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    scale = tl.load(gain + column, inside, 0.0)
    if LAYER:
        shift = tl.load(bias + column, inside, 0.0)
    row = tl.program_id(0).to(tl.int64)
    place = row * dim + column
    wait_for_previous(PDL)
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + place, inside, 0.0).to(tl.float32)
        tl.store(total + place, value.to(total.dtype.element_ty), inside)
    if LAYER:
        value = tl.where(inside, value - tl.sum(value) / dim, 0.0)
    mean_square = tl.sum(value * value) / dim
    normed = value * (1.0 / tl.sqrt(mean_square + eps)) * scale
    if LAYER:
        normed += shift
    store_activations(normed, out + place, scales + row, inside, FP8)


def add_norm(
    x: Any,
    residual: Any | None,
    gain: Any,
    eps: float,
    out: Any,
    total: Any | None,
    fp8: Fp8Activations | None = None,
    bias: Any | None = None,
) -> None:
    """Writes total = x + residual and out = rms_norm(total) * gain, or the layer norm with a `bias`: [T, dim]. Without
    a residual, `total` is x itself. With `fp8`, the rows go there instead of to `out`."""
    rows, dim = x.shape
    block = triton.next_power_of_2(dim)
    sums = x if residual is None else residual, gain, gain if bias is None else bias
    outputs = fp8.values if fp8 else out, x if total is None else total, fp8.scales if fp8 else out
    _add_norm[(rows,)](
        *(x, *sums, *outputs, dim, eps),
        LAYER=bias is not None,
        ADD=residual is not None,
        FP8=fp8 is not None,
        BLOCK=block,
        **launch_options(num_warps=min(max(block // 512, 1), 16)),
    )


def add_layer_norm(
    x: Any,
    residual: Any | None,
    gain: Any,
    bias: Any,
    eps: float,
    out: Any,
    total: Any | None,
    fp8: Fp8Activations | None = None,
) -> None:
    """Writes what `add_norm` does, with the mean of each row taken off first and a bias added."""
    add_norm(x, residual, gain, eps, out, total, fp8, bias)

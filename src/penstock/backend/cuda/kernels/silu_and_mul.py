"""act(left half) * right half."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, store_fp8
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """As tanh approximates it: x * (1 + tanh(z)) / 2 is x / (1 + e^-2z)."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _act_and_mul(
    x, out, scales, hidden, ACT: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    if PDL:
        gdc_wait()
    left = tl.load(x + row * 2 * hidden + column, inside, 0.0).to(tl.float32)
    right = tl.load(x + row * 2 * hidden + hidden + column, inside, 0.0).to(tl.float32)
    if ACT == "clamped":
        left = tl.minimum(left, 7.0)
        gated = left / (1.0 + tl.exp(-1.702 * left)) * (1.0 + tl.minimum(tl.maximum(right, -7.0), 7.0))
    else:
        gated = (gelu(left) if ACT == "gelu_tanh" else silu(left)) * right
    if CODES:
        store_fp8(gated, out + row * hidden + column, scales + row, inside)
    else:
        tl.store(out + row * hidden + column, gated.to(out.dtype.element_ty), inside)


def act_and_mul(x: Any, out: Any, codes: Fp8Activations | None = None, act: str = "silu") -> None:
    """[T, 2 * hidden] -> [T, hidden]; with `codes` there, in float8, instead of to `out`."""
    rows, hidden = out.shape
    block = triton.next_power_of_2(hidden)
    if codes is None:
        block = min(block, 2048)
    _act_and_mul[(rows, triton.cdiv(hidden, block))](
        x,
        codes.values if codes else out,
        codes.scales if codes else out,
        hidden,
        ACT=act,
        CODES=codes is not None,
        BLOCK=block,
        **options(min(max(block // 512, 4), 16)),
    )

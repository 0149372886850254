"""Computes gated activations: act(left half) * right half."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, store_activations
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """Returns the GELU as tanh approximates it: x * (1 + tanh(z)) / 2 is x / (1 + e^-2z)."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _act_and_mul(x, out, scales, hidden, ACT: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    wait_for_previous(PDL)
    left = tl.load(x + row * 2 * hidden + column, inside, 0.0).to(tl.float32)
    right = tl.load(x + row * 2 * hidden + hidden + column, inside, 0.0).to(tl.float32)
    if ACT == "clamped":
        left = tl.minimum(left, 7.0)
        gated = left / (1.0 + tl.exp(-1.702 * left)) * (1.0 + tl.minimum(tl.maximum(right, -7.0), 7.0))
    elif ACT == "gelu":
        gated = gelu(left) * right
    else:
        gated = (gelu_tanh(left) if ACT == "gelu_tanh" else silu(left)) * right
    store_activations(gated, out + row * hidden + column, scales + row, inside, FP8)


def act_and_mul(x: Any, out: Any, fp8: Fp8Activations | None = None, act: str = "silu") -> None:
    """Computes act(left half) * right half: [T, 2 * hidden] -> [T, hidden]; with `fp8` there instead of in `out`."""
    rows, hidden = out.shape
    block = triton.next_power_of_2(hidden)
    if fp8 is None:
        block = min(block, 2048)
    to, scales = fp8 or (out, out)
    options = launch_options(min(max(block // 512, 4), 16))
    grid = (rows, triton.cdiv(hidden, block))
    _act_and_mul[grid](x, to, scales, hidden, ACT=act, FP8=fp8 is not None, BLOCK=block, **options)

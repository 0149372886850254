"""Covers the differences between Triton's interpreter and a GPU, with products that both compute.

The interpreter multiplies only float32 and cuts bits off where a GPU rounds. Kernels ask `INTERPRETED` when they are
compiled, so a GPU's code does not contain it.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def dot_bfloat16(values, items, total):
    """Returns total + values @ items, for float32 `values` that a GPU rounds to bfloat16 and `items` of bfloat16."""
    if INTERPRETED:
        return tl.dot(values, items.to(tl.float32), total)
    else:
        return tl.dot(values.to(tl.bfloat16), items, total)


@triton.jit
def rounded_to_e4m3(values):
    """Returns float32 values rounded to what e4m3 can hold in the interpreter, which cuts bits off when it converts;
    on a GPU, returns them as they are."""
    if INTERPRETED:
        bits = values.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        values = tl.where(tl.abs(values) < 0.015625, (values + 24576.0) - 24576.0, normal)
    return values

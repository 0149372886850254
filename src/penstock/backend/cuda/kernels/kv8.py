"""Keys and values in 8 bits, each line of a head with a scale of its own.

A line's largest value becomes the largest of its type. Scales take 3 % more memory with heads of 128 dimensions. Mean
KL to a cache of 32 bits, simulated on SmolLM2-135M (1,024 tokens of prose) and TinyLlama-1.1B (512), in nats: e4m3
without scales 0.0120 and 0.0060, with them 0.0090 and 0.0033, with powers of two as scales 0.0123 and 0.0053; int8 with
scales 0.0011 and 0.0004. And without scales values beyond 448 would be cut off. int8 is as small as e4m3 and far
closer; e4m3 is there because others call it an FP8 cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def scaling(lines: Any, scales: Any | None) -> dict[str, Any]:
    """What kernels need to know of a cache; they read its scales only where it has any."""
    return {"SCALED": scales is not None, "LARGEST": LARGEST.get(lines.dtype, 1.0), "INTERPRET": not lines.is_cuda}


@triton.jit
def coded(values, scale, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """values / scale as the nearest that `dtype` has. The interpreter cuts bits off: there they are rounded before."""
    values = values / scale
    if dtype == tl.int8:
        values = tl.floor(values + 0.5)
    elif INTERPRET:
        bits = values.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        values = tl.where(tl.abs(values) < 0.015625, (values + 24576.0) - 24576.0, normal)
    return values.to(dtype)

"""Programmatic dependent launch: a kernel starts while the one before it drains, and waits for its results itself.

Every kernel of a step lets the next one start at once, and calls `gdc_wait` before it reads what another kernel wrote
and before it writes anything. What it loads earlier can only be weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["bring", "brought", "gdc_launch_dependents", "gdc_wait", "options"]

enabled = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def bring(start, stride, ROWS: tl.constexpr, PER_ROW: tl.constexpr, PIECE: tl.constexpr, PREFETCH: tl.constexpr):
    """Starts to read PER_ROW * PIECE values of each row into the second-level cache: while a kernel waits for those
    before it, memory would stand still. See `brought`."""
    piece = tl.arange(0, PER_ROW) * PIECE
    at = start + tl.arange(0, ROWS).to(tl.int64)[:, None] * stride + piece[None, :]
    tl.inline_asm_elementwise(PREFETCH, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


def brought(values: int, itemsize: int, rows: int, num_warps: int) -> dict[str, Any]:
    """How `bring` shares out so many values of each row among a program's threads; not at all where it cannot."""
    per_row = max(num_warps * 32 // rows, 1)
    size = values // per_row * itemsize // 16 * 16
    if not enabled or size <= 0:
        return {"PER_ROW": 0, "PIECE": 0, "PREFETCH": ""}
    prefetch = f"cp.async.bulk.prefetch.L2.global [$1], {size}; mov.u32 $0, 0;"
    return {"PER_ROW": per_row, "PIECE": size // itemsize, "PREFETCH": prefetch}


def options(num_warps: int = 4, num_stages: int = 3) -> dict[str, Any]:
    """What every launch says beside its arguments."""
    return {"PDL": enabled, "launch_pdl": enabled, "num_warps": num_warps, "num_stages": num_stages}

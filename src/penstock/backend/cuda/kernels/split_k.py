"""Split-K: several programs share the columns of one tile of a product.

If a matrix does not fill the device, its columns are split over programs. Each leaves its sums behind; the
last one to finish adds them up in order, so that the result does not depend on which one it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

MAX_SPLIT = 8
MAX_PARTIALS = 1 << 23  # values that the programs of one product may leave for each other
MAX_TILES = 1 << 16


class SplitKScratch(NamedTuple):
    """Memory through which the programs of a tile meet; `arrived` is all zeros between launches."""

    partials: Any  # float32
    arrived: Any  # int32, one for each tile

    @classmethod
    def on(cls, device: torch.device) -> SplitKScratch:
        return cls(torch.empty(MAX_PARTIALS, device=device), torch.zeros(MAX_TILES, dtype=torch.int32, device=device))


def row_blocks(count: int, rows: int, split: int, block: int) -> Iterator[slice]:
    """Yields slices of `count` rows, multiples of `block` but for the last, whose partial sums fit the scratch memory
    in a product with a matrix of `rows` rows."""
    most = MAX_PARTIALS // (split * rows)
    size = count if split == 1 or count <= most else max(most // block, 1) * block
    return (slice(first, min(first + size, count)) for first in range(0, count, max(size, 1)))


@triton.jit
def sum_splits(partials, place, stride, inside, SPLIT: tl.constexpr):
    """Returns the sum of what SPLIT programs left at `place`, always in the same order."""
    total = tl.load(partials + place, inside, 0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLIT):
        total += tl.load(partials + split * stride + place, inside, 0.0, cache_modifier=".cg")
    return total


@triton.jit
def joined(total, line, item, wanted, rows, count, scratch, SPLIT: tl.constexpr):
    """Returns whether this program stores the tile [line, item], and the tile's sums over all SPLIT programs."""
    last = True
    if SPLIT > 1:
        place = item * rows + line
        stride = count.to(tl.int64) * rows
        tl.store(scratch.partials + tl.program_id(2) * stride + place, total, wanted)
        tl.debug_barrier()
        arrival = scratch.arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        last = tl.atomic_add(arrival, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(arrival, 0)
            total = sum_splits(scratch.partials, place, stride, wanted, SPLIT)
    return last, total


@triton.jit
def store_tile(total, line, item, wanted, rows, bias, out, out_stride, BIAS: tl.constexpr):
    if BIAS:
        total += tl.load(bias + line, line < rows, 0.0)
    tl.store(out + item * out_stride + line, total.to(out.dtype.element_ty), wanted)

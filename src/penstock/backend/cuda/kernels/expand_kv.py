"""Copies contexts from a KV cache of 8 bits to one of 16, for a kernel that reads only 16 bits (kv_expansion.py)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.contexts import BLOCK, CONTEXT_COLUMNS
from penstock.backend.cuda.kernels.kv_tile import KvShape, PagedKv, line_of, table_of
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous

WARPS = 8


@triton.jit
def _expand_kv(
    kv, blocks, lines, tables, SHAPE: tl.constexpr, POSITIONS: tl.constexpr, STRIDE: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    SIZE: tl.constexpr = SHAPE.block_size
    PAGES: tl.constexpr = POSITIONS // SIZE
    block, kv_head = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    row, first = tl.load(blocks + block * STRIDE), tl.load(blocks + block * STRIDE + 1)
    if row < 0:
        return
    count = tl.load(blocks + block * STRIDE + 2)
    index = tl.arange(0, POSITIONS)
    there = index < count
    page = tl.load(table_of(kv, row) + (first + index) // SIZE, there, 0).to(tl.int64)
    line = line_of(page, index, kv_head, SHAPE)  # blocks of positions begin where pages do
    copy = (block * PAGES + index // SIZE).to(tl.int64)
    target = (copy * (2 * SHAPE.kv_heads) + kv_head) * SIZE + index % SIZE
    d = tl.arange(0, SHAPE.block_d)
    inside = (d < SHAPE.dims)[None, :]
    for side in tl.static_range(2):
        source = line + side * SHAPE.apart
        codes = tl.load(kv.lines + source[:, None] * SHAPE.dims + d[None, :], there[:, None] & inside, 0.0)
        values = codes.to(tl.float32) * tl.load(kv.scales + source, there, 0.0)[:, None]
        at = lines + (target + side * SHAPE.apart)[:, None] * SHAPE.dims + d[None, :]
        tl.store(at, values.to(lines.dtype.element_ty), inside)
    if kv_head == 0:
        entry = tl.arange(0, PAGES)
        to = tables + row.to(tl.int64) * tl.load(kv.header) + first // SIZE + entry
        tl.store(to, block * PAGES + entry, entry * SIZE < count)


def expand_kv(cache: Any, scales: Any, blocks: Any, tables: Any, header: Any, lines: Any, copied_tables: Any) -> None:
    """Copies blocks [B, CONTEXT_COLUMNS] of contexts from a cache [blocks, 2, kv_heads, block_size, D] with scales to
    `lines`, a cache of the same shape in 16 bits, and writes tables of the copy, as wide as `tables`."""
    _, _, kv_heads, block_size, dims = cache.shape
    shape = KvShape(kv_heads, 1, dims, block_size, triton.next_power_of_2(dims), cache.stride(0) // dims, 0)
    _expand_kv[(len(blocks), kv_heads)](
        *(PagedKv(cache, scales, tables, header), blocks, lines, copied_tables),
        SHAPE=shape,
        POSITIONS=BLOCK,
        STRIDE=CONTEXT_COLUMNS,
        **launch_options(WARPS, 1),
    )

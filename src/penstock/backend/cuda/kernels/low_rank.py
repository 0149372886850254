"""Products with adapters (LoRA): rows of a step with different adapters, or none, get their own updates in one launch.

`shrink` computes h = x @ A.T for a tile of rows with one adapter, before the product with the weight itself, whose
loads it overlaps. `expand` then adds h @ B.T to that product. Programs find matrices by the slot of their tile, through
a table of addresses on the device: a graph stays valid while adapters come and go.

Ranks come in chunks of RANKS, padded with zeros. B is stored in blocks of COLUMNS rows, each [chunks, COLUMNS, RANKS].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.adapter_tiles import DECODE_ROWS, PROMPT_ROWS
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations
from penstock.backend.cuda.kernels.interpreter import INTERPRETED
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.silu_and_mul import silu

RANKS = 16  # the least that tensor cores multiply
COLUMNS = 128  # output columns per program
SPLIT = 8  # programs that share the columns of A: always in a step without prompts, at most in one with some
PROGRAMS = 256  # fill the device
RECORD = 8  # words: the addresses of A, of B and of the blocks, how many chunks and blocks there are; three are spare
BLOCK = 8  # words: first column, columns; then chunk of h, chunks, place in B, for the left half and for the right
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class RowTiles(NamedTuple):
    """Divides a step's rows into tiles of rows with one adapter."""

    tiles: Any  # [D, 4] slot (-1: none), first place in `order`, rows, unused; without an order [D] slots
    order: Any | None  # [T] rows; None: tile i is row i
    size: int  # most rows of a tile


class AdaptedWeight(NamedTuple):
    """Says where the updates of one weight are."""

    records: Any  # [slots, weights, RECORD] int64
    number: int  # the weight's, among all
    chunks: int  # the most that a slot has
    blocks: int
    aligned: bool  # the columns of all blocks begin and end at multiples of 16
    dtype: torch.dtype  # type of A and B


class Layout(NamedTuple):
    """Holds the constants of both kernels."""

    size: int
    ordered: bool
    max_split: int
    width: int  # columns of A at a time
    fp8: bool = False
    gated: bool = False
    aligned: bool = True


@triton.jit
def rows_of(tiles, order, tile, LAYOUT: tl.constexpr):
    SIZE: tl.constexpr = LAYOUT.size
    item = tl.arange(0, SIZE)
    if LAYOUT.ordered:
        slot = tl.load(tiles + 4 * tile)
        there = item < tl.load(tiles + 4 * tile + 2)
        row = tl.load(order + tl.load(tiles + 4 * tile + 1) + item, there, 0)
    else:
        slot = tl.load(tiles + tile)
        there = item < 1
        row = item * 0 + tile
    return slot, row.to(tl.int64), there


@triton.jit
def address(word, DTYPE: tl.constexpr):
    """Returns the address, a multiple of 16, that a word of a record holds."""
    return tl.multiple_of(tl.load(word).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def dot_ieee(a, b, total):
    """Returns total + a @ b, without rounding float32 further."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["weights", "number", "most", "steps"])
def _shrink(
    x,
    scales,
    tiles,
    order,
    records,
    h,
    weights,
    number,
    width,
    most,
    steps,
    LAYOUT: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    SIZE: tl.constexpr = LAYOUT.size
    WIDTH: tl.constexpr = LAYOUT.width
    split, chunk = tl.program_id(0), tl.program_id(1)
    slot, row, there = rows_of(tiles, order, tl.program_id(2), LAYOUT)
    record = records + (tl.maximum(slot, 0).to(tl.int64) * weights + number) * 8
    known = (slot >= 0) & (chunk < tl.load(record + 3))
    a = address(record, DTYPE)
    rank = chunk * 16 + tl.arange(0, 16)
    column = tl.arange(0, WIDTH)
    lines = a + rank[:, None] * width
    begin = split * steps * WIDTH
    end = tl.minimum(begin + steps * WIDTH, width)
    values = tl.load(lines + (begin + column)[None, :], known & (begin + column < end)[None, :], 0.0)
    wait_for_previous(PDL)
    if known:
        total = tl.zeros([SIZE, 16], tl.float32)
        for start in tl.range(begin, end, WIDTH):
            at = start + column
            inside = there[:, None] & (at < end)[None, :]
            items = tl.load(x + row[:, None] * width + at[None, :], inside, 0.0).to(DTYPE)
            total = dot_ieee(items, tl.trans(values), total)
            ahead = at + WIDTH
            values = tl.load(lines + ahead[None, :], (ahead < end)[None, :], 0.0)
        if LAYOUT.fp8:
            total *= tl.load(scales + row, there, 0.0)[:, None]
        place = ((row * most + chunk) * tl.num_programs(0) + split)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(h + place, total, there[:, None])


@triton.jit
def load_block(b, at, chunk, chunks):
    line = tl.arange(0, 128)[:, None] * 16 + tl.arange(0, 16)[None, :]
    return tl.load(b + (at.to(tl.int64) + chunk * 128) * 16 + line, chunk < chunks, 0.0)


@triton.jit
def load_side(words, b, known):
    """Returns three words of a block (place of its ranks in h, number of chunks, place of the chunks in B) and the
    first chunk."""
    first = tl.load(words, known, 0)
    chunks = tl.load(words + 1, known, 0)
    at = tl.load(words + 2, known, 0)
    return first, chunks, at, load_block(b, at, 0, chunks)


@triton.jit
def expanded(h, there, split, b, side, LAYOUT: tl.constexpr):
    """Returns h @ B.T for one side of a block, from what `split` programs left of h."""
    SIZE: tl.constexpr = LAYOUT.size
    SPLITS: tl.constexpr = LAYOUT.max_split
    first, chunks, at, values = side
    total = tl.zeros([SIZE, 128], tl.float32)
    for chunk in range(0, chunks):
        place = h + (first + chunk) * split * 16
        low = tl.load(place, there[:, None], 0.0)
        for part in tl.static_range(1, SPLITS):
            low += tl.load(place + part * 16, there[:, None] & (part < split), 0.0)
        total = dot_ieee(low.to(values.dtype), tl.trans(values), total)
        values = load_block(b, at, chunk + 1, chunks)
    return total


@triton.jit(do_not_specialize=["weights", "number", "most", "split"])
def _expand(
    h,
    tiles,
    order,
    records,
    y,
    out,
    weights,
    number,
    width,
    stride,
    most,
    split,
    LAYOUT: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    block = tl.program_id(0)
    slot, row, there = rows_of(tiles, order, tl.program_id(1), LAYOUT)
    record = records + (tl.maximum(slot, 0).to(tl.int64) * weights + number) * 8
    known = (slot >= 0) & (block < tl.load(record + 4))
    b = address(record + 1, DTYPE)
    entry = address(record + 2, tl.int32) + block * 8
    left = load_side(entry + 2, b, known)
    low = h + row[:, None] * (most * split * 16) + tl.arange(0, 16)[None, :]
    if LAYOUT.gated:
        right = load_side(entry + 5, b, known)
        column = block * 128 + tl.arange(0, 128)
        inside = there[:, None] & (column < width)[None, :]
        wait_for_previous(PDL)
        place = row[:, None] * (2 * width) + column[None, :]
        gate = tl.load(y + place, inside, 0.0).to(tl.float32)
        value = tl.load(y + place + width, inside, 0.0).to(tl.float32)
        gate += expanded(low, there, split, b, left, LAYOUT)
        value += expanded(low, there, split, b, right, LAYOUT)
        value = (silu(gate) * value).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * stride + column[None, :], value, inside)
    else:
        column = tl.arange(0, 128)
        first, columns = tl.load(entry, known, 0), tl.load(entry + 1, known, 0)
        if LAYOUT.aligned:
            first, columns = tl.multiple_of(first, 16), tl.multiple_of(columns, 16)
        inside = there[:, None] & (column < columns)[None, :]
        place = row[:, None] * stride + first + column[None, :]
        wait_for_previous(PDL)
        if known:
            total = tl.load(y + place, inside, 0.0).to(tl.float32)
            total += expanded(low, there, split, b, left, LAYOUT)
            tl.store(out + place, total.to(out.dtype.element_ty), inside)


def split_of(width: int, rows: RowTiles, chunks: int) -> int:
    if rows.size == DECODE_ROWS:
        return SPLIT
    return max(min(-(-width // 512), SPLIT, -(-PROGRAMS // (len(rows.tiles) * chunks))), 1)


def values_needed(rows: int, tokens: int, chunks: int) -> int:
    return max(SPLIT * rows * chunks, PROMPT_ROWS * PROGRAMS + tokens * chunks) * RANKS


def shrink(x: Any, rows: RowTiles, weight: AdaptedWeight, h: Any) -> None:
    """Writes x @ A.T of each row's adapter to h [T, chunks, split, RANKS] float32."""
    values, scales = x if isinstance(x, Fp8Activations) else (x, x)
    width, tiles = values.shape[1], len(rows.tiles)
    split = split_of(width, rows, weight.chunks)
    at_once = 512 if rows.size == DECODE_ROWS else 128
    steps = triton.cdiv(triton.cdiv(width, split), at_once)
    layout = Layout(rows.size, rows.order is not None, 0, at_once, fp8=values is not x)
    order = rows.tiles if rows.order is None else rows.order
    numbers = weight.records.shape[1], weight.number, width, weight.chunks, steps
    _shrink[(split, weight.chunks, tiles)](
        *(values, scales, rows.tiles, order, weight.records, h, *numbers),
        LAYOUT=layout,
        DTYPE=TYPES[weight.dtype],
        **launch_options(4, 1 if rows.size == DECODE_ROWS else 3),  # few steps have nothing to overlap
    )


def expand(h: Any, width: int, rows: RowTiles, weight: AdaptedWeight, y: Any, out: Any, gated: bool = False) -> None:
    """Adds h @ B.T of each row's adapter to y, for the h that `shrink` made of rows of this `width`; out is y itself.
    Gated: writes silu(left half of the sum) * right half to out, which may be y's left half, for every row that has a
    tile."""
    split = split_of(width, rows, weight.chunks)
    most = triton.next_power_of_2(split)  # loads that find nothing cost time, and each number is another kernel
    layout = Layout(rows.size, rows.order is not None, most, 0, gated=gated, aligned=weight.aligned)
    order = rows.tiles if rows.order is None else rows.order
    numbers = weight.records.shape[1], weight.number, out.shape[1], out.stride(0), weight.chunks, split
    blocks = triton.cdiv(out.shape[1], COLUMNS) if gated else weight.blocks
    _expand[(blocks, len(rows.tiles))](
        *(h, rows.tiles, order, weight.records, y, out, *numbers),
        LAYOUT=layout,
        DTYPE=TYPES[weight.dtype],
        **launch_options(4, 1),
    )

"""Adds the updates of adapters (LoRA) to a product while it is computed: parts of the kernel in hopper_gemm.py.

Sums of a tile begin as B @ h.T instead of zeros; `shrink_few` has computed h. So an update takes one short launch, and
the time to read A and B: B is requested before h is there, and the tiles of the matrix arrive meanwhile.

A program takes all rows of the step. It multiplies with B of four adapters at a time, side by side, and takes h as zero
for rows with another adapter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations
from penstock.backend.cuda.kernels.low_rank import SPLIT, TYPES, AdaptedWeight, RowTiles
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options

MAX_ROWS = 64  # rows of a step, and so adapters
MAX_WIDTH = 16 * 256 * SPLIT  # columns of A


class ProductUpdates(NamedTuple):
    """Says which updates a product adds to its sums."""

    tiles: Any  # [D, 4] the last column has the slots in use, then -1
    slots: Any  # [T] of each row, -1: none
    records: Any  # [slots, weights, RECORD] from the weight's own record on
    h: Any  # [T, chunks, SPLIT, RANKS] float32
    weights: int  # records of a slot
    chunks: int  # the most that a slot has
    depth: int  # the most chunks that one block of B has


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def prefetch(address, size):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, size],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def block_of(slot, updates, block, SIDE: gl.constexpr):
    """Returns for slots (-1: none) where a block of B is, the first chunk of h that it is multiplied with, and how many
    there are. A block of a gated weight has two sides."""
    _, _, records, _, weights, _, _ = updates
    record = records + gl.maximum(slot, 0).to(gl.int64) * weights * 8
    known = gl.load(record + 4, slot >= 0, 0) > block
    words = gl.load(record + 2, known, 0).to(gl.pointer_type(gl.int32)) + block * 8 + 2 + 3 * SIDE
    chunk = gl.load(words, known, 0)
    chunks = gl.load(words + 1, known, 0)
    return gl.load(record + 1, known, 0) + gl.load(words + 2, known, 0).to(gl.int64) * 32, chunk, chunks


@gluon.jit
def in_groups(values):
    """Returns shared memory with the values of 64 adapters in groups of four: [16, 4]."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kept = gl.allocate_shared_memory(values.dtype, [64], FLAT, values)
    return kept._reinterpret(values.dtype, [16, 4], FLAT)


@gluon.jit
def find_side(updates, slot, tile, part, split, row_slot, GATED: gl.constexpr, RIGHT: gl.constexpr):
    """Returns for one half of a tile where each adapter's rows of B are and how many chunks they have, and for each row
    of the step the first chunk of h and their number. Begins to bring every `split`-th group of B, from `part` on, to
    the L2 cache: this program multiplies these."""
    block = tile // 2 if GATED else tile
    SIDE: gl.constexpr = 1 if GATED and RIGHT else 0
    place, _, chunks = block_of(slot, updates, block, SIDE)
    place += (tile % 2 if GATED else RIGHT) * 2048
    FLAT: gl.constexpr = slot.type.layout
    user = gl.arange(0, 64, FLAT)
    prefetch(place, gl.where((chunks > 0) & (user // 4 % split == part), 2048, 0))
    _, first, depth = block_of(row_slot, updates, block, SIDE)
    return in_groups(place), in_groups(chunks), first, depth


@gluon.jit
def find_updates(updates, room, tile, part, split, count, GATED: gl.constexpr, COUNT: gl.constexpr):
    """Returns all that a program can know of the updates of its tile before h is there: what `find_side` does for both
    halves, the slots in groups, and how many groups there are."""
    LOW: gl.constexpr = gl.BlockedLayout([1, 4, 8], [16, 1, 2], [4, 1, 1], [2, 1, 0])
    tiles, slots, _, _, _, _, _ = updates
    user = gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    slot = gl.load(tiles + 4 * user + 3, user < room, -1)
    row = gl.arange(0, COUNT, gl.SliceLayout(1, gl.SliceLayout(1, LOW)))
    row_slot = gl.load(slots + row, row < count, -1)
    left = find_side(updates, slot, tile, part, split, row_slot, GATED, 0)
    right = find_side(updates, slot, tile, part, split, row_slot, GATED, 1)
    used = gl.reduce((slot >= 0).to(gl.int32), 0, _add)
    return left, right, in_groups(slot), (used + 3) // 4


@gluon.jit
def sum_low_rank(to, updates, side, turn, count, LOW: gl.constexpr):
    """Stores h of all rows, summed over the programs that shared its columns: the chunk `turn` of each row's own. In
    shared memory it takes no registers while other loads are under way."""
    FLAT: gl.constexpr = gl.SliceLayout(1, LOW)
    _, _, _, h, _, most, _ = updates
    _, _, first, depth = side
    row = gl.arange(0, to.shape[0], gl.SliceLayout(1, FLAT))
    rank = gl.arange(0, 16, gl.SliceLayout(0, FLAT))[None, :]
    place = h + ((row * most + first + turn) * 128)[:, None] + rank
    there = ((row < count) & (turn < depth))[:, None]
    total = gl.load(place, there, 0.0, cache_modifier=".cg")
    for split in gl.static_range(1, 8):
        total += gl.load(place + split * 16, there, 0.0, cache_modifier=".cg")
    to.store(total.to(to.dtype))


@gluon.jit
def load_b(side, work, groups):
    """Returns a chunk of the rows of B of a group of adapters, zeros if there is none: [64, 4, 8] pairs of values,
    which take half the registers of single ones. Work goes through all groups, then again for the next chunk."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 4, 2], [4, 1, 1], [2, 1, 0])
    USER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, TILE))
    places, depths, _, _ = side
    most = gl.maximum(groups, 1)
    turn = work // most
    row = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, TILE)))
    pair = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
    place = gl.multiple_of(places.index(work % most).load(USER).to(gl.pointer_type(gl.int32)), 16) + turn * 1024
    there = (turn < depths.index(work % most).load(USER))[None, :, None]
    return gl.load(place[None, :, None] + (row[:, None, None] * 8 + pair[None, None, :]), there, 0)


@gluon.jit
def store_b(tile, pairs):
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    tile._reinterpret(gl.int32, [64, 32], PAIRS).store(gl.reshape(pairs, [64, 32]))


@gluon.jit
def store_low_rank(tile, low, mine, LOW: gl.constexpr):
    """Stores h of rows side by side for each adapter of a group, with zeros for those that are not the row's."""
    values = low.load(gl.SliceLayout(1, LOW))[:, None, :]
    tile.store(gl.reshape(gl.where(mine[:, :, None], values, 0.0).to(tile.dtype), tile.shape))


@gluon.jit
def low_rank_sums(updates, found, tiles, part, split, count, GATED: gl.constexpr, COUNT: gl.constexpr):
    """Returns B @ h.T for both halves of a tile, of every `split`-th group of adapters from `part` on. `tiles` is
    shared memory for B and h of both halves, which are the same without a gate."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16])
    LOW: gl.constexpr = gl.BlockedLayout([1, 4, 8], [16, 1, 2], [4, 1, 1], [2, 1, 0])
    OWN: gl.constexpr = gl.SliceLayout(2, LOW)
    left_b, right_b, left_h, right_h = tiles
    left_side, right_side, slots, groups = found
    row = gl.arange(0, COUNT, gl.SliceLayout(1, OWN))
    row_slot = gl.load(updates[1] + row, row < count, -1)
    left = gl.zeros([64, COUNT], gl.float32, SUMS)
    right = gl.zeros([64, COUNT], gl.float32, SUMS)
    left_now = load_b(left_side, part, groups)
    right_now = load_b(right_side, part, groups)
    left_low = gl.allocate_shared_memory(left_h.dtype, [COUNT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    right_low = gl.allocate_shared_memory(left_h.dtype, [COUNT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sum_low_rank(left_low, updates, left_side, 0, count, LOW)
    if GATED:
        sum_low_rank(right_low, updates, right_side, 0, count, LOW)
    turn = 0
    for work in range(part, groups * updates[6], split):
        if work // groups > turn:
            turn = work // groups
            sum_low_rank(left_low, updates, left_side, turn, count, LOW)
            if GATED:
                sum_low_rank(right_low, updates, right_side, turn, count, LOW)
        mine = row_slot[:, None] == slots.index(work % groups).load(gl.SliceLayout(0, OWN))[None, :]
        store_b(left_b, left_now)
        store_b(right_b, right_now)
        store_low_rank(left_h, left_low, mine, LOW)
        if GATED:
            store_low_rank(right_h, right_low, mine, LOW)
        fence_async_shared()
        left = warpgroup_mma(left_b, left_h.permute((1, 0)), left, is_async=True)
        right = warpgroup_mma(right_b, right_h.permute((1, 0)), right, is_async=True)
        left_now = load_b(left_side, work + split, groups)
        right_now = load_b(right_side, work + split, groups)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    return left, right


# -- x @ A.T ------------------------------------------------------------------------------------------------------


@gluon.jit
def _columns_of(split, LAYOUT: gl.constexpr, WARPS: gl.constexpr, SPAN: gl.constexpr, AT: gl.constexpr):
    """Returns the columns of A that a program multiplies, SPAN for each warp; tensors have them at dimension AT."""
    AFTER: gl.constexpr = gl.SliceLayout(3 - AT, LAYOUT)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, AFTER))[:, None]
    column = (split * WARPS + warp) * SPAN + gl.arange(0, SPAN, gl.SliceLayout(0, AFTER))[None, :]
    return column[:, None, :] if AT == 2 else column[:, :, None]


@gluon.jit(do_not_specialize=["weights", "count", "most"])
def _shrink_few(
    x,
    scales,
    tiles,
    order,
    records,
    h,
    weights,
    count,
    width,
    most,
    KIND: gl.constexpr,
    FP8: gl.constexpr,
    SPAN: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    ROWS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    RANKS: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    split, chunk, tile = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    slot = gl.load(tiles + 4 * tile)
    first = gl.load(tiles + 4 * tile + 1)
    size = gl.load(tiles + 4 * tile + 2)
    record = records + gl.maximum(slot, 0).to(gl.int64) * weights * 8
    known = (slot >= 0) & (chunk < gl.load(record + 3))
    a = gl.multiple_of(gl.load(record).to(gl.pointer_type(KIND)), 16)
    rank = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, RANKS)))[None, None, :]
    column = _columns_of(split, RANKS, WARPS, SPAN, 1)
    values = gl.load(a + (chunk * 16 + rank) * width + column, known & (column < width), 0.0)
    item = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))
    row = gl.load(order + first + item, item < size, 0)[None, :, None]
    column = _columns_of(split, ROWS, WARPS, SPAN, 2)
    inside = known & (item < size)[None, :, None] & (column < width)
    if PDL:
        gdc_wait()
    items = gl.load(x + row * width + column, inside, 0.0).to(KIND)
    sums = mma_v2(items, values, gl.zeros([WARPS, 16, 16], gl.float32, SUMS))
    total = gl.reduce(sums, 0, _add)
    item = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    rank = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    row = gl.load(order + first + item, item < size, 0)
    if FP8:
        total *= gl.load(scales + row, item < size, 0.0)[:, None]
    place = h + ((row * most + chunk) * 8 + split)[:, None] * 16 + rank
    gl.store(place, total, (item < size)[:, None] & known)


def shrink_few(x: Any, rows: RowTiles, weight: AdaptedWeight, h: Any) -> None:
    """Does what `shrink` does for few rows and at most MAX_WIDTH columns. It needs almost no shared memory, so that
    programs of the next product can start and fetch their matrix."""
    values, scales = x if isinstance(x, Fp8Activations) else (x, x)
    count, width = values.shape
    at_once = max(triton.next_power_of_2(-(-width // SPLIT)), 64)
    warps = min(max(at_once // 128, 1), 8 if at_once <= 2048 else 16)
    _shrink_few[(SPLIT, weight.chunks, len(rows.tiles))](
        *(values, scales, rows.tiles, rows.order, weight.records[:, weight.number :], h),
        *(weight.records.shape[1], count, width, weight.chunks),
        KIND=TYPES[weight.dtype],
        FP8=values is not x,
        SPAN=at_once // warps,
        WARPS=warps,
        **launch_options(warps, 1),
    )

"""Adds the updates of adapters (LoRA) to a product while it is computed: parts of the kernel in hopper_gemm.py.

Sums of a tile begin as B @ h.T, where they would else begin as zeros; `shrink` (low_rank.py) has left h. So an update
takes one short launch, and the time to read A and B: where B is found, and B itself, is asked for before h is there,
and the tiles of the matrix arrive meanwhile.

A program takes all rows of the step. It multiplies with B of four adapters at a time, side by side, and takes h as zero
for rows that have another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

MAX_ROWS = 64  # rows of a step, and so adapters


class ProductUpdates(NamedTuple):
    """Says which updates a product adds to its sums."""

    tiles: Any  # [D, 4] the last column has the slots in use, then -1
    slots: Any  # [T] of each row, -1: none
    records: Any  # [slots, weights, RECORD] from the weight's own record on
    h: Any  # [SPLIT, T, chunks * RANKS] float32
    weights: int  # records of a slot
    chunks: int  # the most that a slot has
    depth: int  # the most chunks that one block of B has


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def prefetch(address, size):
    """Begins to bring so many bytes from each address to the L2 cache."""
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
    """Returns for one half of a tile where each adapter's rows of B are and how many chunks these have; and for each
    row of the step the first chunk of h and how many. Begins to bring B to the L2 cache: every `split`-th group's, from
    `part` on, which are those that this program multiplies."""
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
def find_updates(
    updates, room, tile, part, split, count, GATED: gl.constexpr, COUNT: gl.constexpr, LOW: gl.constexpr
):
    """Returns all that a program can know of the updates of its tile before h is there: what `find_side` does for both
    halves, the slots in groups, and how many groups there are."""
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
def load_low_rank(
    updates, side, turn, count, COUNT: gl.constexpr, LOW: gl.constexpr, AT_ONCE: gl.constexpr
):
    """Returns h of all rows, summed over the programs that shared its columns, so many of them at once: the chunk
    `turn` of each row's own."""
    FLAT: gl.constexpr = gl.SliceLayout(1, LOW)
    _, _, _, h, _, most, _ = updates
    _, _, first, depth = side
    row = gl.arange(0, COUNT, gl.SliceLayout(1, FLAT))
    rank = gl.arange(0, 16, gl.SliceLayout(0, FLAT))[None, :]
    place = h + ((row * most + first + turn) * 16)[:, None] + rank
    there = ((row < count) & (turn < depth))[:, None]
    total = gl.zeros([COUNT, 16], gl.float32, FLAT)
    for begin in range(0, 8, AT_ONCE):
        for split in gl.static_range(AT_ONCE):
            total += gl.load(place + (begin + split) * count * most * 16, there, 0.0, cache_modifier=".cg")
    return total


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
    """Stores B of a group of adapters side by side: [64, 64]."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    tile._reinterpret(gl.int32, [64, 32], PAIRS).store(gl.reshape(pairs, [64, 32]))


@gluon.jit
def store_low_rank(tile, low, mine):
    """Stores h of rows side by side for each adapter of a group, with zeros for those that are not the row's."""
    tile.store(gl.reshape(gl.where(mine[:, :, None], low[:, None, :], 0.0).to(tile.dtype), tile.shape))


@gluon.jit
def low_rank_sums(
    updates, found, tiles, part, split, count, GATED: gl.constexpr, COUNT: gl.constexpr
):
    """Returns B @ h.T for both halves of a tile, of every `split`-th group of adapters from `part` on. `tiles` is shared
    memory for B of both halves and for h of both, which are the same where there is no gate."""
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
    left_low = load_low_rank(updates, left_side, 0, count, COUNT, LOW, 4 if GATED else 8)
    right_low = load_low_rank(updates, right_side, 0, count, COUNT, LOW, 4) if GATED else left_low
    turn = 0
    for work in range(part, groups * updates[6], split):
        if work // groups > turn:
            turn = work // groups
            left_low = load_low_rank(updates, left_side, turn, count, COUNT, LOW, 2)
            right_low = load_low_rank(updates, right_side, turn, count, COUNT, LOW, 2) if GATED else left_low
        mine = row_slot[:, None] == slots.index(work % groups).load(gl.SliceLayout(0, OWN))[None, :]
        store_b(left_b, left_now)
        store_b(right_b, right_now)
        store_low_rank(left_h, left_low, mine)
        if GATED:
            store_low_rank(right_h, right_low, mine)
        fence_async_shared()
        left = warpgroup_mma(left_b, left_h.permute((1, 0)), left, is_async=True)
        right = warpgroup_mma(right_b, right_h.permute((1, 0)), right, is_async=True)
        left_now = load_b(left_side, work + split, groups)
        right_now = load_b(right_side, work + split, groups)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    return left, right

"""GEMM of up to 128 rows with a matrix on Hopper (TMA and WGMMA), at the speed the matrix can be read.

The copy engine brings tiles of the matrix into shared memory several ahead of the tensor cores, and begins before the
kernel that makes the rows has ended. A program takes whole lines of tiles without a pause, or shares a line with
others: then the last to finish adds up all sums in order, so that the result does not depend on which one it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.backend.cuda.kernels.hopper_low_rank import ProductUpdates, find_updates, low_rank_sums
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options
from penstock.backend.cuda.kernels.split_k import SplitKScratch

MAX_ROWS = 128  # rows
HALF = 64  # rows of the matrix in each half of a tile
LINE = 128  # bytes of a row in a tile
WARPS = 4
SHARED = 113 << 10  # bytes of shared memory, with two programs on a multiprocessor


class Tiling(NamedTuple):
    """Says how a product is tiled: programs take whole lines of tiles, or share one."""

    split: int  # programs that share a line of tiles
    lines: int  # one program's, if none are shared
    stages: int


@gluon.jit
def _fetch(matrix, left, right, ready, line, other, column, slot, wanted, BYTES: gl.constexpr):
    barrier = ready.index(slot)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(matrix, [line, column], barrier, left.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(matrix, [other, column], barrier, right.index(slot), pred=wanted)


@gluon.jit
def _fetch_items(x, items, ready, first, last, steps, STAGES: gl.constexpr, WIDTH: gl.constexpr):
    for stage in gl.static_range(STAGES):
        at = first + stage
        tma.async_copy_global_to_shared(x, [0, at % steps * WIDTH], ready.index(stage), items.index(stage), at < last)


@gluon.jit
def _sum_splits(parts, place, first, split, SIZE: gl.constexpr):
    left = gl.load(parts + first * SIZE + place, cache_modifier=".cg")
    right = gl.load(parts + first * SIZE + SIZE // 2 + place, cache_modifier=".cg")
    for program in range(first + 1, first + split):
        left += gl.load(parts + program * SIZE + place, cache_modifier=".cg")
        right += gl.load(parts + program * SIZE + SIZE // 2 + place, cache_modifier=".cg")
    return left, right


@gluon.jit
def _affine(total, line, item, rows, count, scales, item_scales, bias, SCALED: gl.constexpr, BIAS: gl.constexpr):
    if SCALED:
        total *= gl.load(scales + line, line < rows, 0.0) * gl.load(item_scales + item, item < count, 0.0)
    if BIAS:
        total += gl.load(bias + line, line < rows, 0.0)
    return total


@gluon.jit
def _unscaled(total, top, rows, count, scales, item_scales):
    LAYOUT: gl.constexpr = total.type.layout
    line = top + gl.arange(0, total.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    item = gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    return total / (gl.load(scales + line, line < rows, 1.0) * gl.load(item_scales + item, item < count, 1.0))


@gluon.jit
def _keep(value, out, first, rows, count, out_stride, LAYOUT: gl.constexpr):
    """Stores a tile so that neighbours in a row of `out` are stored together."""
    value = gl.convert_layout(value.to(out.dtype.element_ty), LAYOUT)
    line = first + gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    item = gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out + item.to(gl.int64) * out_stride + line, value, (line < rows) & (item < count))


@gluon.jit
def _multiply(
    matrix, x, shared, left, right, begin, end, first, last, steps, apart, HEIGHT: gl.constexpr, FILLED: gl.constexpr
):
    """Returns the sums of both halves plus the products of the tiles from `begin` to `end`. The program has those from
    `first` to `last`, and FILLED of them were on their way at first."""
    left_tiles, right_tiles, items, ready = shared
    STAGES: gl.constexpr = items.shape[0]
    WIDTH: gl.constexpr = items.shape[2]
    BYTES: gl.constexpr = (2 * left_tiles.shape[1] + items.shape[1]) * WIDTH * items.dtype.primitive_bitwidth // 8
    for at in range(begin, end):
        turn = at - first
        slot = turn % STAGES
        mbarrier.wait(ready.index(slot), turn // STAGES & 1)
        across = items.index(slot).permute((1, 0))
        left = warpgroup_mma(left_tiles.index(slot), across, left, is_async=True)
        right = warpgroup_mma(right_tiles.index(slot), across, right, is_async=True)
        left, right = warpgroup_mma_wait(2, deps=[left, right])  # the turn before has ended
        ahead = at - 1 + STAGES
        line = ahead // steps * HEIGHT
        column = ahead % steps * WIDTH
        free = (turn + STAGES - 1) % STAGES
        wanted = (turn > FILLED - STAGES) & (ahead < last)
        _fetch(matrix, left_tiles, right_tiles, ready, line, line + apart, column, free, wanted, BYTES)
        tma.async_copy_global_to_shared(x, [0, column], ready.index(free), items.index(free), wanted)
    return warpgroup_mma_wait(0, deps=[left, right])


@gluon.jit
def _finish(
    left,
    right,
    tile,
    program,
    split,
    scratch,
    factors,
    out,
    out_stride,
    count,
    rows,
    GATED: gl.constexpr,
    SCALED: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Stores the sums of a tile; where programs share its line, the last of them does for all."""
    ROWS: gl.constexpr = left.shape[0]
    COUNT: gl.constexpr = left.shape[1]
    SIZE: gl.constexpr = 2 * ROWS * COUNT
    ACROSS: gl.constexpr = 2 if COUNT == 8 else 4 if COUNT == 16 else 8
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    KEPT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    parts, arrived = scratch
    scales, item_scales, bias = factors
    left_sum, right_sum = gl.convert_layout(left, FLAT), gl.convert_layout(right, FLAT)
    item = gl.arange(0, COUNT, gl.SliceLayout(0, FLAT))[None, :]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))[:, None]
    done = split == 1
    if not done:
        place = row * COUNT + item
        gl.store(parts + program * SIZE + place, left_sum)
        gl.store(parts + program * SIZE + SIZE // 2 + place, right_sum)
        gl.thread_barrier()
        done = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == split - 1
        if done:
            gl.store(arrived + tile, 0)
            left_sum, right_sum = _sum_splits(parts, place, tile * split, split, SIZE)
    if done:
        top = tile * (ROWS if GATED else 2 * ROWS)
        left_sum = _affine(left_sum, top + row, item, rows, count, scales, item_scales, bias, SCALED, BIAS)
        if GATED:
            scales_right, bias_right = scales + rows, bias + rows
            right_sum = _affine(
                right_sum, top + row, item, rows, count, scales_right, item_scales, bias_right, SCALED, BIAS
            )
            _keep(left_sum / (1.0 + gl.exp(-left_sum)) * right_sum, out, top, rows, count, out_stride, KEPT)
        else:
            below = top + ROWS
            right_sum = _affine(right_sum, below + row, item, rows, count, scales, item_scales, bias, SCALED, BIAS)
            _keep(left_sum, out, top, rows, count, out_stride, KEPT)
            _keep(right_sum, out, below, rows, count, out_stride, KEPT)


@gluon.jit(do_not_specialize=["count", "split", "lines", "weights", "chunks", "depth", "room"])
def _hopper_gemm(
    matrix,
    x,
    scales,
    item_scales,
    bias,
    out,
    parts,
    arrived,
    count,
    rows,
    steps,
    split,
    lines,
    out_stride,
    updates,
    weights,
    chunks,
    depth,
    room,
    UPDATED: gl.constexpr,
    GATED: gl.constexpr,
    SCALED: gl.constexpr,
    BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    COUNT: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    BITS: gl.constexpr = matrix.dtype.primitive_bitwidth
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COUNT, 256 // BITS])
    BYTES: gl.constexpr = (2 * ROWS + COUNT) * WIDTH * BITS // 8
    HEIGHT: gl.constexpr = ROWS if GATED else 2 * ROWS
    left_tiles = gl.allocate_shared_memory(matrix.dtype, [STAGES, ROWS, WIDTH], matrix.layout)
    right_tiles = gl.allocate_shared_memory(matrix.dtype, [STAGES, ROWS, WIDTH], matrix.layout)
    items = gl.allocate_shared_memory(x.dtype, [STAGES, COUNT, WIDTH], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)

    apart = rows if GATED else ROWS  # from a row of the left half of a tile to its fellow in the right one
    program = gl.program_id(0)
    share = steps // split * lines
    first = program * share
    last = gl.minimum(first + share, gl.cdiv(rows, HEIGHT) * steps)
    FILLED: gl.constexpr = STAGES - 1 if UPDATED else STAGES  # stages before the first turn: updates need one
    for stage in gl.static_range(FILLED):
        at = first + stage
        line = at // steps * HEIGHT
        column = at % steps * WIDTH
        _fetch(matrix, left_tiles, right_tiles, ready, line, line + apart, column, stage, at < last, BYTES)
    shared = (left_tiles, right_tiles, items, ready)
    scratch, factors = (parts, arrived), (scales, item_scales, bias)
    if UPDATED:
        KIND: gl.constexpr = out.dtype.element_ty
        TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        tiles, slots, records, h = updates
        known = (tiles, slots, records, h, weights, chunks, depth)
        tile, part = first // steps, program % split
        found = find_updates(known, room, tile, part, split, count, GATED, COUNT)
        if PDL:
            gdc_wait()
        _fetch_items(x, items, ready, first, last, steps, FILLED, WIDTH)
        left_b = left_tiles.index(FILLED)._reinterpret(KIND, [ROWS, 64], TILE)
        right_b = right_tiles.index(FILLED)._reinterpret(KIND, [ROWS, 64], TILE)
        left_h = items.index(FILLED)._reinterpret(KIND, [COUNT, 64], TILE)
        right_h = gl.allocate_shared_memory(KIND, [COUNT, 64], TILE) if GATED else left_h
        free = (left_b, right_b, left_h, right_h)
        left, right = low_rank_sums(known, found, free, part, split, count, GATED, COUNT)
        if SCALED:
            beside = scales + rows if GATED else scales
            left = _unscaled(left, tile * HEIGHT, rows, count, scales, item_scales)
            right = _unscaled(right, tile * HEIGHT + (0 if GATED else ROWS), rows, count, beside, item_scales)
        left, right = gl.convert_layout(left, SUMS), gl.convert_layout(right, SUMS)
        left, right = _multiply(matrix, x, shared, left, right, first, last, first, last, steps, apart, HEIGHT, FILLED)
        _finish(left, right, tile, program, split, scratch, factors, out, out_stride, count, rows, GATED, SCALED, BIAS)
    else:
        if PDL:
            gdc_wait()
        _fetch_items(x, items, ready, first, last, steps, FILLED, WIDTH)
        begin = first
        while begin < last:
            tile = begin // steps
            end = gl.minimum((tile + 1) * steps, last)
            left = gl.zeros([ROWS, COUNT], gl.float32, SUMS)
            right = gl.zeros([ROWS, COUNT], gl.float32, SUMS)
            left, right = _multiply(
                matrix, x, shared, left, right, begin, end, first, last, steps, apart, HEIGHT, FILLED
            )
            _finish(
                left, right, tile, program, split, scratch, factors, out, out_stride, count, rows, GATED, SCALED, BIAS
            )
            begin = end


def items_of(count: int) -> int:
    return max(1 << (count - 1).bit_length(), 8)


def steps_of(width: int, itemsize: int) -> int:
    return -(-width * itemsize // LINE)


def hopper_gemm(
    x: Any,
    weight: Any,
    bias: Any | None,
    out: Any,
    tiling: Tiling,
    scratch: SplitKScratch,
    *,
    gated: bool = False,
    scales: Any | None = None,
    item_scales: Any | None = None,
    updates: ProductUpdates | None = None,
) -> None:
    """Computes out [count, rows] = x [count, width] @ weight [rows, width].T (+ bias), for values of 16 bits, or of 8
    with a scale for each row of both; gated: silu of its first half times its second, so out is half as wide. Updates
    of adapters are added to the product; then a program takes one line."""
    assert not updates or tiling.lines == 1
    (count, width), rows = x.shape, out.shape[1]
    tiles = -(-rows // (HALF if gated else 2 * HALF))
    columns = LINE // weight.element_size()
    _hopper_gemm[(-(-tiles // tiling.lines) * tiling.split,)](
        described(weight, HALF, columns),
        described(x, items_of(count), columns),
        out if scales is None else scales,
        out if item_scales is None else item_scales,
        out if bias is None else bias,
        out,
        scratch.partials,
        scratch.arrived,
        count,
        rows,
        steps_of(width, weight.element_size()),
        tiling.split,
        tiling.lines,
        out.stride(0),
        *(updates_arguments(updates) if updates else ((), 0, 0, 0, 0)),
        UPDATED=updates is not None,
        GATED=gated,
        SCALED=scales is not None,
        BIAS=bias is not None,
        ROWS=HALF,
        COUNT=items_of(count),
        WIDTH=columns,
        STAGES=tiling.stages,
        WARPS=WARPS,
        **launch_options(WARPS, 1),
    )


def updates_arguments(updates: ProductUpdates) -> tuple[Any, ...]:
    return updates[:4], *updates[4:], len(updates.tiles)


def described(tensor: Any, rows: int, columns: int) -> Any:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=LINE, element_bitwidth=8 * tensor.element_size(), rank=2)
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)

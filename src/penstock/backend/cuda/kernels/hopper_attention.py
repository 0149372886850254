"""Attention of runs of tokens over a paged context on Hopper (TMA and WGMMA), for causal attention over 16-bit keys.

One warp copies blocks of keys and values into shared memory, ahead of two warpgroups that attend with half of a tile's
pairs of token and head each. A warpgroup starts the scores of the next keys and the mix of the last values together,
and computes the softmax meanwhile. The warpgroups take turns on the tensor cores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.backend.cuda.kernels.decode_attention import AttentionOptions
from penstock.backend.cuda.kernels.kv_tile import LOG2E, KvShape, shape_of
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options

QUERIES = gl.constexpr(64)  # pairs of token and head that a warpgroup attends with
COLUMNS = gl.constexpr(64)  # 16-bit values in a row of a copy: 128 bytes, which the swizzle takes at most
BLOCK_SIZE = 16  # positions in a block of the cache
WARPS = 4  # in a warpgroup
REGISTERS = gl.constexpr((240, 24))  # per attending thread, per copying thread
RESIDENT = gl.constexpr(24 << 20)  # bytes of keys and values that programs read together: they stay in the L2 cache


class HopperAttentionTiling(NamedTuple):
    """Says how a program goes through a context."""

    tile: int  # positions at a time
    stages: int


class HopperAttentionConfig(NamedTuple):
    """Holds the constants of a launch."""

    shape: KvShape
    window: int
    capped: bool
    sinks: bool
    tile: int  # positions at a time
    stages: int


class TileSpan(NamedTuple):
    """Says which queries a program has, and which tiles of positions they see: it goes from the last to the first."""

    kv_head: Any
    token: Any  # its first
    first: Any  # position of it
    count: Any  # tokens
    begin: Any  # first tile of positions
    head: Any  # the first tile that lies within the windows of all queries
    whole: Any  # the first tile that is not wholly before all queries
    last: Any  # the last tile


class Buffers(NamedTuple):
    """Holds shared memory: keys and values by stage, and barriers that say when a stage is filled and when it is
    free."""

    queries: Any
    key_tiles: Any
    value_tiles: Any
    keys_ready: Any
    values_ready: Any
    keys_free: Any
    values_free: Any


@gluon.jit
def _boxes(buffer, CONFIG: gl.constexpr):
    """Returns a view of stages [STAGES, TILE, D] as boxes [*, block_size, COLUMNS], in the order of shared memory:
    by stage, by columns, by block."""
    SHAPE: gl.constexpr = CONFIG.shape
    COUNT: gl.constexpr = CONFIG.stages * CONFIG.tile * SHAPE.dims // (SHAPE.block_size * COLUMNS)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BLOCK: gl.constexpr = SHAPE.block_size
    return buffer._reinterpret(buffer.dtype, [COUNT, BLOCK, COLUMNS], LAYOUT)


@gluon.jit
def _fetch(lines, table, boxes, ready, free, turn, span, behind, CONFIG: gl.constexpr):
    """Begins the copies of a tile's blocks, when its stage is free. Blocks that no query sees become zero."""
    SHAPE: gl.constexpr = CONFIG.shape
    BLOCKS: gl.constexpr = CONFIG.tile // SHAPE.block_size
    HALVES: gl.constexpr = SHAPE.dims // COLUMNS
    stage = turn % CONFIG.stages
    mbarrier.wait(free.index(stage), (turn // CONFIG.stages & 1) ^ 1)
    barrier = ready.index(stage)
    mbarrier.expect(barrier, CONFIG.tile * SHAPE.dims * 2)
    end = gl.cdiv(span.first + span.count, SHAPE.block_size)
    begin = 0
    if CONFIG.window:
        begin = gl.maximum(span.first - CONFIG.window + 1, 0) // SHAPE.block_size
    place = (span.last - turn) * BLOCKS
    for index in gl.static_range(BLOCKS):
        at = place + index
        seen = (at >= begin) & (at < end)
        block = gl.load(table + at, seen, 0)
        line = gl.where(seen, block * SHAPE.block_lines + behind, -SHAPE.block_size)
        for half in gl.static_range(HALVES):
            box = boxes.index((stage * HALVES + half) * BLOCKS + index)
            tma.async_copy_global_to_shared(lines, [line, half * COLUMNS], barrier, box)


@gluon.jit
def _produce(lines, table, span, buffers, CONFIG: gl.constexpr):
    SHAPE: gl.constexpr = CONFIG.shape
    keys, values = _boxes(buffers.key_tiles, CONFIG), _boxes(buffers.value_tiles, CONFIG)
    key = span.kv_head * SHAPE.block_size
    value = key + SHAPE.kv_heads * SHAPE.block_size
    turns = span.last - span.begin + 1
    if span.count > 0:
        _fetch(lines, table, keys, buffers.keys_ready, buffers.keys_free, 0, span, key, CONFIG)
        for turn in range(1, turns):
            _fetch(lines, table, keys, buffers.keys_ready, buffers.keys_free, turn, span, key, CONFIG)
            _fetch(lines, table, values, buffers.values_ready, buffers.values_free, turn - 1, span, value, CONFIG)
        _fetch(lines, table, values, buffers.values_ready, buffers.values_free, turns - 1, span, value, CONFIG)


@gluon.jit
def await_turn(WHICH: gl.constexpr):
    """Waits until the other warpgroup has started its products. Triton numbers its own barriers from 0 on."""
    if WHICH == 0:
        gl.inline_asm_elementwise("bar.sync 14, 256; mov.u32 $0, $1;", "=r,r", [0], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.sync 15, 256; mov.u32 $0, $1;", "=r,r", [0], gl.int32, False, 1)


@gluon.jit
def give_turn(WHICH: gl.constexpr):
    if WHICH == 0:
        gl.inline_asm_elementwise("bar.arrive 15, 256; mov.u32 $0, $1;", "=r,r", [0], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.arrive 14, 256; mov.u32 $0, $1;", "=r,r", [0], gl.int32, False, 1)


@gluon.jit
def packed_pairs(weight, KIND: gl.constexpr):
    """Returns float32 weights as pairs of 16-bit values. A loop that carries single values of 16 bits takes them apart
    and puts them together in every turn."""
    low, high = gl.split(gl.reshape(weight, [weight.shape[0], weight.shape[1] // 2, 2]))
    if KIND.is_bf16():
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1)


@gluon.jit
def unpacked_pairs(weight, KIND: gl.constexpr, DIMS: gl.constexpr):
    MIX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS, 16])
    kinds: gl.constexpr = (gl.int16, gl.int16)
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [weight], kinds, True, 1)
    both = gl.join(low.to(KIND, bitcast=True), high.to(KIND, bitcast=True))
    weight = gl.reshape(both, [weight.shape[0], weight.shape[1] * 2])
    return gl.convert_layout(weight, gl.DotOperandLayout(0, MIX, 2))


@gluon.jit
def take_scores(score, highest, total, own, start, scale, cap, MASKED: gl.constexpr, CONFIG: gl.constexpr):
    """Takes scores into a running softmax; returns its highest score, their weights, what the mix so far shrinks by,
    and the sum of weights."""
    if CONFIG.capped:
        score = cap - 2.0 * cap / (gl.exp2(score * (scale * 2.8853900817779268 / cap)) + 1.0)
        scale = 1.0
    if MASKED:
        column = gl.arange(0, CONFIG.tile, gl.SliceLayout(0, score.type.layout))[None, :]
        newest = (own - start)[:, None]
        score = gl.where(column <= newest, score, -float("inf"))
        if CONFIG.window:
            score = gl.where(column > newest - CONFIG.window, score, -float("inf"))
    peak = gl.maximum(highest, gl.max(score, 1))
    weight = gl.exp2(score * scale - (peak * scale)[:, None])
    shrink = gl.exp2((highest - peak) * scale)
    return peak, weight, shrink, total * shrink + gl.sum(weight, 1)


@gluon.jit
def _turns(
    buffers, state, begin, end, span, own, scale, cap, WHICH: gl.constexpr, MASKED: gl.constexpr, CONFIG: gl.constexpr
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.tile, 16])
    MIX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.shape.dims, 16])
    highest, total, mix, weight = state
    TILE: gl.constexpr = CONFIG.tile
    KIND: gl.constexpr = buffers.queries.dtype
    zeros = gl.zeros([QUERIES, TILE], gl.float32, SCORES)
    for turn in range(begin, end):
        stage = turn % CONFIG.stages
        before = (turn - 1) % CONFIG.stages
        mbarrier.wait(buffers.keys_ready.index(stage), turn // CONFIG.stages & 1)
        await_turn(WHICH)
        keys = buffers.key_tiles.index(stage).permute((1, 0))
        score = warpgroup_mma(buffers.queries.index(WHICH), keys, zeros, use_acc=False, is_async=True)
        mbarrier.wait(buffers.values_ready.index(before), (turn - 1) // CONFIG.stages & 1)
        weights = unpacked_pairs(weight, KIND, CONFIG.shape.dims)
        mix = warpgroup_mma(weights, buffers.value_tiles.index(before), mix, is_async=True)
        give_turn(WHICH)
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(buffers.keys_free.index(stage))
        start = (span.last - turn) * CONFIG.tile
        highest, fresh, shrink, total = take_scores(score, highest, total, own, start, scale, cap, MASKED, CONFIG)
        weight = packed_pairs(fresh, KIND)
        mix, weights = warpgroup_mma_wait(0, deps=[mix, weights])
        mbarrier.arrive(buffers.values_free.index(before))
        mix = mix * gl.convert_layout(shrink, gl.SliceLayout(1, MIX))[:, None]
    return highest, total, mix, weight


@gluon.jit
def _clear_tail(buffers, span, CONFIG: gl.constexpr):
    """Clears the values behind the last position in its block: their weight is zero, but they may be no numbers. Both
    warpgroups write the same."""
    SHAPE: gl.constexpr = CONFIG.shape
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCKS: gl.constexpr = CONFIG.tile // SHAPE.block_size
    end = span.first + span.count
    used = end % SHAPE.block_size
    if used > 0:
        boxes = _boxes(buffers.value_tiles, CONFIG)
        row = gl.arange(0, SHAPE.block_size, gl.SliceLayout(1, LAYOUT))[:, None]
        for half in gl.static_range(SHAPE.dims // COLUMNS):
            box = boxes.index(half * BLOCKS + end // SHAPE.block_size % BLOCKS)
            value = box.load(LAYOUT)
            box.store(gl.where(row < used, value, gl.zeros_like(value)))
        fence_async_shared()


@gluon.jit
def _first_turn(buffers, span, own, scale, cap, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    """Returns the running softmax over the last tile of positions: the highest score, the sum of weights, no mix of
    values yet, and the weights."""
    TILE: gl.constexpr = CONFIG.tile
    DIMS: gl.constexpr = CONFIG.shape.dims
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.tile, 16])
    MIX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.shape.dims, 16])
    queries, keys = buffers.queries.index(WHICH), buffers.key_tiles.index(0).permute((1, 0))
    if WHICH == 1:
        give_turn(WHICH)
    mbarrier.wait(buffers.keys_ready.index(0), 0)
    await_turn(WHICH)
    score = gl.zeros([QUERIES, TILE], gl.float32, SCORES)
    score = warpgroup_mma(queries, keys, score, use_acc=False, is_async=True)
    give_turn(WHICH)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(buffers.keys_free.index(0))
    highest = gl.full([QUERIES], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(1, SCORES))
    start = span.last * CONFIG.tile
    highest, weight, _shrink, total = take_scores(score, highest, total, own, start, scale, cap, True, CONFIG)
    mbarrier.wait(buffers.values_ready.index(0), 0)
    _clear_tail(buffers, span, CONFIG)
    return highest, total, gl.zeros([QUERIES, DIMS], gl.float32, MIX), packed_pairs(weight, queries.dtype)


@gluon.jit
def _consume(qkv, out, sinks, span, buffers, scale, cap, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    SHAPE: gl.constexpr = CONFIG.shape
    DIMS: gl.constexpr = SHAPE.dims
    GROUP: gl.constexpr = SHAPE.group
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.tile, 16])
    MIX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACROSS: gl.constexpr = DIMS // 8
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    queries = buffers.queries.index(WHICH)

    pair = WHICH * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, FLAT))
    d = gl.arange(0, DIMS, gl.SliceLayout(0, FLAT))[None, :]
    index = pair // GROUP
    wanted = (index < span.count)[:, None]
    head = span.kv_head * GROUP + pair % GROUP
    row = (span.token + index).to(gl.int64)
    queries.store(gl.load(qkv + (row * SHAPE.row_heads + head)[:, None] * DIMS + d, wanted, 0.0))
    fence_async_shared()

    pair = WHICH * QUERIES + gl.arange(0, QUERIES, ROWS)
    own = span.first + pair // GROUP
    state = _first_turn(buffers, span, own, scale, cap, WHICH, CONFIG)
    masked = gl.maximum(span.last - span.whole + 1, 1)
    inside = gl.maximum(span.last - span.head + 1, masked)
    turns = span.last - span.begin + 1
    state = _turns(buffers, state, 1, masked, span, own, scale, cap, WHICH, True, CONFIG)
    state = _turns(buffers, state, masked, inside, span, own, scale, cap, WHICH, False, CONFIG)
    if CONFIG.window:
        state = _turns(buffers, state, inside, turns, span, own, scale, cap, WHICH, True, CONFIG)
    highest, total, mix, weight = state
    stage = (turns - 1) % CONFIG.stages
    mbarrier.wait(buffers.values_ready.index(stage), (turns - 1) // CONFIG.stages & 1)
    weights = unpacked_pairs(weight, queries.dtype, DIMS)
    mix = warpgroup_mma(weights, buffers.value_tiles.index(stage), mix, is_async=True)
    mix, weights = warpgroup_mma_wait(0, deps=[mix, weights])
    if WHICH == 0:
        await_turn(WHICH)  # the other one gave one turn more than it took

    if CONFIG.sinks:
        sink = gl.load(sinks + span.kv_head * GROUP + pair % GROUP) * 1.4426950408889634
        total += gl.exp2(sink - highest * (1.0 if CONFIG.capped else scale))
    mix = mix / gl.convert_layout(total, gl.SliceLayout(1, MIX))[:, None]
    queries.store(mix.to(queries.dtype))
    mix = queries.load(FLAT)
    gl.store(out + (row * SHAPE.heads + head)[:, None] * DIMS + d, mix, wanted)


@gluon.jit
def _first_half(qkv, out, sinks, span, buffers, scale, cap, CONFIG: gl.constexpr):
    if span.count > 0:
        _consume(qkv, out, sinks, span, buffers, scale, cap, 0, CONFIG)


@gluon.jit
def _second_half(qkv, out, sinks, span, buffers, scale, cap, CONFIG: gl.constexpr):
    if span.count > 0:
        _consume(qkv, out, sinks, span, buffers, scale, cap, 1, CONFIG)


@gluon.jit
def _task_of(header, count, CONFIG: gl.constexpr):
    """Returns the KV head and the tile of a program. As many heads as the L2 cache holds the context of go together,
    and of these the first tiles first: they see most (see `tiles_of`), so that none of them is left for the end."""
    SHAPE: gl.constexpr = CONFIG.shape
    HEADS: gl.constexpr = SHAPE.kv_heads
    LINES: gl.constexpr = RESIDENT // (4 * SHAPE.dims)
    together = gl.minimum(gl.maximum(LINES // (gl.load(header) * SHAPE.block_size), 1), HEADS)
    program = gl.program_id(0)
    begin = program // (together * count) * together
    heads = gl.minimum(together, HEADS - begin)
    rest = program - begin * count
    return begin + rest % heads, rest // heads


@gluon.jit
def _span_of(kv_head, at, CONFIG: gl.constexpr):
    TILE: gl.constexpr = CONFIG.tile
    token, first, count = gl.load(at), gl.load(at + 2), gl.load(at + 3)
    count = gl.where(token < 0, 0, count)  # padding
    end = first + count
    begin = end * 0
    head = begin
    whole = (first + 1) // TILE
    last = gl.maximum(gl.cdiv(end, TILE) - 1, 0)
    if CONFIG.window:
        begin = gl.maximum(first - CONFIG.window + 1, 0) // TILE
        head = gl.maximum(gl.cdiv(gl.maximum(end - CONFIG.window, 0), TILE), begin)
    return TileSpan(kv_head, token, first, count, begin, head, whole, last)


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_free.index(stage), count=2)
    return keys_ready, values_ready, keys_free, values_free


@gluon.jit(do_not_specialize=["count"])
def _hopper_attention(
    lines,
    qkv,
    tables,
    header,
    tiles,
    count,
    out,
    sinks,
    scale,
    cap,
    CONFIG: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    SHAPE: gl.constexpr = CONFIG.shape
    STAGES: gl.constexpr = CONFIG.stages
    TILE: gl.constexpr = CONFIG.tile
    DIMS: gl.constexpr = SHAPE.dims
    LAYOUT: gl.constexpr = lines.layout
    queries = gl.allocate_shared_memory(lines.dtype, [2, QUERIES, DIMS], LAYOUT)
    keys = gl.allocate_shared_memory(lines.dtype, [STAGES, TILE, DIMS], LAYOUT)
    values = gl.allocate_shared_memory(lines.dtype, [STAGES, TILE, DIMS], LAYOUT)
    keys_ready, values_ready, keys_free, values_free = make_barriers(STAGES)
    if PDL:
        gdc_wait()
    kv_head, tile = _task_of(header, count, CONFIG)
    span = _span_of(kv_head, tiles + tile * 5, CONFIG)
    table = tables + gl.load(tiles + tile * 5 + 1).to(gl.int64) * gl.load(header)
    buffers = Buffers(queries, keys, values, keys_ready, values_ready, keys_free, values_free)
    gl.warp_specialize(
        [
            (_first_half, (qkv, out, sinks, span, buffers, scale, cap, CONFIG)),
            (_second_half, (qkv, out, sinks, span, buffers, scale, cap, CONFIG)),
            (_produce, (lines, table, span, buffers, CONFIG)),
        ],
        [4, 1],
        REGISTERS,
    )


def has_all_of(cache: Any, qkv: Any, shape: KvShape, options: AttentionOptions) -> bool:
    """Returns whether the kernel does all that is asked for: values of 16 bits, blocks of 16 positions, causal
    attention, and of the options a window, a soft cap and sinks."""
    known = AttentionOptions(options.window, options.capped, options.sinks)
    fits = shape.block_size == BLOCK_SIZE and shape.group <= 2 * QUERIES.value
    return options == known and fits and cache.dtype == qkv.dtype and qkv.element_size() == 2


def hopper_attention(
    qkv: Any,
    cache: Any,
    tiles: Any,
    tables: Any,
    header: Any,
    out: Any,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    sinks: Any | None = None,
    *,
    tiling: HopperAttentionTiling,
) -> None:
    """Attends as `prefill_attention` does: with causal runs of tokens over keys and values of 16 bits."""
    shape = shape_of(cache, qkv, out)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    count = (len(cache) - 1) * shape.block_lines + 2 * shape.apart
    lines = cache.as_strided((count, shape.dims), (shape.dims, 1))
    _hopper_attention[(shape.kv_heads * len(tiles),)](
        TensorDescriptor.from_tensor(lines, [shape.block_size, COLUMNS.value], layout),
        *(qkv, tables, header, tiles, len(tiles), out, out if sinks is None else sinks),
        *(scale * LOG2E, soft_cap * LOG2E),
        CONFIG=HopperAttentionConfig(shape, window, soft_cap > 0, sinks is not None, *tiling),
        **launch_options(WARPS, 1),
    )

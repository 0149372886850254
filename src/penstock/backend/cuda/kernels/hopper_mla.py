"""Multi-head latent attention (MLA) of runs of tokens in its expanded form on Hopper (TMA and WGMMA): does what
mla_expanded.py does, as hopper_attention.py does it.

A program has the tokens of one head. Keys are in two tiles, of the dimensions that are not rotated and of those that
are, which all heads share: scores are the sum of two products. Contexts and pieces begin at multiples of a tile, so
that all that is copied exists.
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

from penstock.backend.cuda.kernels.hopper_attention import (
    COLUMNS,
    QUERIES,
    REGISTERS,
    RESIDENT,
    WARPS,
    HopperAttentionTiling,
    await_turn,
    give_turn,
    make_barriers,
    packed_pairs,
    take_scores,
    unpacked_pairs,
)
from penstock.backend.cuda.kernels.kv_tile import LOG2E
from penstock.backend.cuda.kernels.mla_expanded import Carry, ExpandedKv
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options


class HopperMlaConfig(NamedTuple):
    """Holds the constants of a launch."""

    heads: int
    nope: int
    rope: int
    v_dim: int
    room: int  # positions of a piece
    together: int  # heads whose programs run together: their part of a piece fits the L2 cache
    tile: int  # positions at a time
    stages: int
    window: int = 0  # MLA has none
    capped: bool = False


class PieceSpan(NamedTuple):
    """Says which queries a program has, and which tiles of the piece they see: it goes from the last to the first. All
    positions count from the start of the piece."""

    head: Any
    token: Any  # its first
    first: Any  # position of it
    count: Any  # tokens; 0: nothing to attend to
    begin: Any  # first tile of positions
    whole: Any  # the first tile that is not wholly before all queries
    last: Any  # the last tile
    continues: Any  # whether an earlier piece has a part of the context
    ends: Any  # whether no later one has


class MlaBuffers(NamedTuple):
    """Holds shared memory: queries, keys and values by stage, and barriers that say when a stage is filled and when it
    is free."""

    nope_queries: Any
    rope_queries: Any
    nope_tiles: Any
    rope_tiles: Any
    value_tiles: Any
    keys_ready: Any
    values_ready: Any
    keys_free: Any
    values_free: Any


@gluon.jit
def boxes_of(buffer, CONFIG: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    COUNT: gl.constexpr = CONFIG.stages * buffer.shape[2] // COLUMNS
    TILE: gl.constexpr = CONFIG.tile
    return buffer._reinterpret(buffer.dtype, [COUNT, TILE, COLUMNS], LAYOUT)


@gluon.jit
def copy_tile(lines, boxes, barrier, line, stage, DIMS: gl.constexpr):
    for part in gl.static_range(DIMS // COLUMNS):
        box = boxes.index(stage * (DIMS // COLUMNS) + part)
        tma.async_copy_global_to_shared(lines, [line, part * COLUMNS], barrier, box)


@gluon.jit
def copy_keys(nope, rope, buffers, turn, span, CONFIG: gl.constexpr):
    stage = turn % CONFIG.stages
    mbarrier.wait(buffers.keys_free.index(stage), (turn // CONFIG.stages & 1) ^ 1)
    barrier = buffers.keys_ready.index(stage)
    mbarrier.expect(barrier, CONFIG.tile * (CONFIG.nope + CONFIG.rope) * 2)
    position = (span.last - turn) * CONFIG.tile
    line = span.head * CONFIG.room + position
    copy_tile(nope, boxes_of(buffers.nope_tiles, CONFIG), barrier, line, stage, CONFIG.nope)
    copy_tile(rope, boxes_of(buffers.rope_tiles, CONFIG), barrier, position, stage, CONFIG.rope)


@gluon.jit
def copy_values(values, buffers, turn, span, CONFIG: gl.constexpr):
    stage = turn % CONFIG.stages
    mbarrier.wait(buffers.values_free.index(stage), (turn // CONFIG.stages & 1) ^ 1)
    barrier = buffers.values_ready.index(stage)
    mbarrier.expect(barrier, CONFIG.tile * CONFIG.v_dim * 2)
    line = span.head * CONFIG.room + (span.last - turn) * CONFIG.tile
    copy_tile(values, boxes_of(buffers.value_tiles, CONFIG), barrier, line, stage, CONFIG.v_dim)


@gluon.jit
def _produce(nope, rope, values, span, buffers, CONFIG: gl.constexpr):
    turns = span.last - span.begin + 1
    if span.count > 0:
        copy_keys(nope, rope, buffers, 0, span, CONFIG)
        for turn in range(1, turns):
            copy_keys(nope, rope, buffers, turn, span, CONFIG)
            copy_values(values, buffers, turn - 1, span, CONFIG)
        copy_values(values, buffers, turns - 1, span, CONFIG)


@gluon.jit
def start_scores(buffers, stage, zeros, WHICH: gl.constexpr):
    nope, rope = buffers.nope_tiles.index(stage).permute((1, 0)), buffers.rope_tiles.index(stage).permute((1, 0))
    score = warpgroup_mma(buffers.nope_queries.index(WHICH), nope, zeros, use_acc=False, is_async=True)
    return warpgroup_mma(buffers.rope_queries.index(WHICH), rope, score, is_async=True)


@gluon.jit
def _turns(
    buffers, state, begin, end, span, own, scale, WHICH: gl.constexpr, MASKED: gl.constexpr, CONFIG: gl.constexpr
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.tile, 16])
    MIX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.v_dim, 16])
    TILE: gl.constexpr = CONFIG.tile
    KIND: gl.constexpr = buffers.nope_queries.dtype
    highest, total, mix, weight = state
    zeros = gl.zeros([QUERIES, TILE], gl.float32, SCORES)
    for turn in range(begin, end):
        stage = turn % CONFIG.stages
        before = (turn - 1) % CONFIG.stages
        mbarrier.wait(buffers.keys_ready.index(stage), turn // CONFIG.stages & 1)
        await_turn(WHICH)
        score = start_scores(buffers, stage, zeros, WHICH)
        mbarrier.wait(buffers.values_ready.index(before), (turn - 1) // CONFIG.stages & 1)
        weights = unpacked_pairs(weight, KIND, CONFIG.v_dim)
        mix = warpgroup_mma(weights, buffers.value_tiles.index(before), mix, is_async=True)
        give_turn(WHICH)
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(buffers.keys_free.index(stage))
        start = (span.last - turn) * CONFIG.tile
        highest, fresh, shrink, total = take_scores(score, highest, total, own, start, scale, 0.0, MASKED, CONFIG)
        weight = packed_pairs(fresh, KIND)
        mix, weights = warpgroup_mma_wait(0, deps=[mix, weights])
        mbarrier.arrive(buffers.values_free.index(before))
        mix = mix * gl.convert_layout(shrink, gl.SliceLayout(1, MIX))[:, None]
    return highest, total, mix, weight


@gluon.jit
def _first_turn(buffers, softmax, span, own, scale, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.tile, 16])
    MIX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.v_dim, 16])
    TILE: gl.constexpr = CONFIG.tile
    highest, total, mix = softmax
    if WHICH == 1:
        give_turn(WHICH)
    mbarrier.wait(buffers.keys_ready.index(0), 0)
    await_turn(WHICH)
    score = start_scores(buffers, 0, gl.zeros([QUERIES, TILE], gl.float32, SCORES), WHICH)
    give_turn(WHICH)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(buffers.keys_free.index(0))
    start = span.last * CONFIG.tile
    highest, weight, shrink, total = take_scores(score, highest, total, own, start, scale, 0.0, True, CONFIG)
    mix = mix * gl.convert_layout(shrink, gl.SliceLayout(1, MIX))[:, None]
    return highest, total, mix, packed_pairs(weight, buffers.nope_queries.dtype)


@gluon.jit
def _store_queries(q, to, span, first, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    DIMS: gl.constexpr = to.shape[1]
    ACROSS: gl.constexpr = DIMS // 8
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    index = WHICH * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, FLAT))
    d = gl.arange(0, DIMS, gl.SliceLayout(0, FLAT))[None, :]
    line = (span.token + index).to(gl.int64) * CONFIG.heads + span.head
    source = q + line[:, None] * (CONFIG.nope + CONFIG.rope) + first + d
    to.store(gl.load(source, (index < span.count)[:, None], 0.0))


@gluon.jit
def _found_before(carry, span, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.tile, 16])
    MIX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.v_dim, 16])
    index = WHICH * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, SCORES))
    there = span.continues & (index < span.count)
    line = (span.token + index).to(gl.int64) * CONFIG.heads + span.head
    highest = gl.load(carry.stats + line * 2, there, -1e30)
    total = gl.load(carry.stats + line * 2 + 1, there, 0.0)
    index = WHICH * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, MIX))
    line = (span.token + index).to(gl.int64) * CONFIG.heads + span.head
    d = gl.arange(0, CONFIG.v_dim, gl.SliceLayout(0, MIX))[None, :]
    there = (span.continues & (index < span.count))[:, None]
    return highest, total, gl.load(carry.mix + line[:, None] * CONFIG.v_dim + d, there, 0.0)


@gluon.jit
def _leave(softmax, carry, span, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    MIX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.v_dim, 16])
    highest, total, mix = softmax
    index = WHICH * QUERIES + gl.arange(0, QUERIES, highest.type.layout)
    line = (span.token + index).to(gl.int64) * CONFIG.heads + span.head
    gl.store(carry.stats + line * 2, highest, index < span.count)
    gl.store(carry.stats + line * 2 + 1, total, index < span.count)
    index = WHICH * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, MIX))
    line = (span.token + index).to(gl.int64) * CONFIG.heads + span.head
    d = gl.arange(0, CONFIG.v_dim, gl.SliceLayout(0, MIX))[None, :]
    gl.store(carry.mix + line[:, None] * CONFIG.v_dim + d, mix, (index < span.count)[:, None])


@gluon.jit
def _answer(mix, out, span, room, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    """Stores what heads found; `room` is shared memory that lets neighbours be stored together."""
    V_DIM: gl.constexpr = CONFIG.v_dim
    ACROSS: gl.constexpr = V_DIM // 8
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    room.store(mix.to(room.dtype))
    index = WHICH * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, FLAT))
    line = (span.token + index).to(gl.int64) * CONFIG.heads + span.head
    d = gl.arange(0, V_DIM, gl.SliceLayout(0, FLAT))[None, :]
    gl.store(out + line[:, None] * V_DIM + d, room.load(FLAT), (index < span.count)[:, None])


@gluon.jit
def _consume(q, out, carry, span, buffers, scale, WHICH: gl.constexpr, CONFIG: gl.constexpr):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.tile, 16])
    MIX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.v_dim, 16])
    queries = buffers.nope_queries.index(WHICH)
    _store_queries(q, queries, span, 0, WHICH, CONFIG)
    _store_queries(q, buffers.rope_queries.index(WHICH), span, CONFIG.nope, WHICH, CONFIG)
    fence_async_shared()

    own = span.first + WHICH * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, SCORES))
    state = _first_turn(buffers, _found_before(carry, span, WHICH, CONFIG), span, own, scale, WHICH, CONFIG)
    turns = span.last - span.begin + 1
    masked = gl.minimum(gl.maximum(span.last - span.whole + 1, 1), turns)
    state = _turns(buffers, state, 1, masked, span, own, scale, WHICH, True, CONFIG)
    state = _turns(buffers, state, masked, turns, span, own, scale, WHICH, False, CONFIG)
    highest, total, mix, weight = state
    stage = (turns - 1) % CONFIG.stages
    mbarrier.wait(buffers.values_ready.index(stage), (turns - 1) // CONFIG.stages & 1)
    weights = unpacked_pairs(weight, queries.dtype, CONFIG.v_dim)
    mix = warpgroup_mma(weights, buffers.value_tiles.index(stage), mix, is_async=True)
    mix, weights = warpgroup_mma_wait(0, deps=[mix, weights])
    if WHICH == 0:
        await_turn(WHICH)  # the other one gave one turn more than it took

    if span.ends:
        mix = mix / gl.convert_layout(total, gl.SliceLayout(1, MIX))[:, None]
        _answer(mix, out, span, queries, WHICH, CONFIG)
    else:
        _leave((highest, total, mix), carry, span, WHICH, CONFIG)


@gluon.jit
def _first_half(q, out, carry, span, buffers, scale, CONFIG: gl.constexpr):
    if span.count > 0:
        _consume(q, out, carry, span, buffers, scale, 0, CONFIG)


@gluon.jit
def _second_half(q, out, carry, span, buffers, scale, CONFIG: gl.constexpr):
    if span.count > 0:
        _consume(q, out, carry, span, buffers, scale, 1, CONFIG)


@gluon.jit
def _span_of(tiles, starts, count, begin, CONFIG: gl.constexpr):
    TILE: gl.constexpr = CONFIG.tile
    ROOM: gl.constexpr = CONFIG.room
    TOGETHER: gl.constexpr = CONFIG.together
    program = gl.program_id(0)
    below = program // (TOGETHER * count) * TOGETHER
    heads = gl.minimum(TOGETHER, CONFIG.heads - below)
    rest = program - below * count
    tile = rest // heads
    at = tiles + tile * 5
    token, first, tokens = gl.load(at), gl.load(at + 2), gl.load(at + 3)
    context = gl.load(starts + tile) - begin
    end = context + first + tokens
    low, high = gl.maximum(context, 0), gl.minimum(end, ROOM)
    tokens = gl.where((token < 0) | (low >= high), 0, tokens)  # padding, or a tile that sees nothing of this piece
    last = gl.maximum(gl.cdiv(high, TILE) - 1, 0)
    whole = gl.maximum(context + first + 1, 0) // TILE
    return PieceSpan(
        below + rest % heads, token, context + first, tokens, low // TILE, whole, last, context < 0, end <= ROOM
    )


@gluon.jit(do_not_specialize=["count", "begin"])
def _hopper_mla(
    nope, rope, values, q, tiles, starts, count, begin, out, carry, scale, CONFIG: gl.constexpr, PDL: gl.constexpr
):
    if PDL:
        gdc_launch_dependents()
    STAGES: gl.constexpr = CONFIG.stages
    TILE: gl.constexpr = CONFIG.tile
    NOPE: gl.constexpr = CONFIG.nope
    ROPE: gl.constexpr = CONFIG.rope
    V_DIM: gl.constexpr = CONFIG.v_dim
    LAYOUT: gl.constexpr = nope.layout
    nope_queries = gl.allocate_shared_memory(nope.dtype, [2, QUERIES, NOPE], LAYOUT)
    rope_queries = gl.allocate_shared_memory(nope.dtype, [2, QUERIES, ROPE], LAYOUT)
    nope_tiles = gl.allocate_shared_memory(nope.dtype, [STAGES, TILE, NOPE], LAYOUT)
    rope_tiles = gl.allocate_shared_memory(nope.dtype, [STAGES, TILE, ROPE], LAYOUT)
    value_tiles = gl.allocate_shared_memory(nope.dtype, [STAGES, TILE, V_DIM], LAYOUT)
    barriers = make_barriers(STAGES)
    if PDL:
        gdc_wait()
    span = _span_of(tiles, starts, count, begin, CONFIG)
    buffers = MlaBuffers(nope_queries, rope_queries, nope_tiles, rope_tiles, value_tiles, *barriers)
    gl.warp_specialize(
        [
            (_first_half, (q, out, carry, span, buffers, scale, CONFIG)),
            (_second_half, (q, out, carry, span, buffers, scale, CONFIG)),
            (_produce, (nope, rope, values, span, buffers, CONFIG)),
        ],
        [4, 1],
        REGISTERS,
    )


def hopper_mla(
    q: Any,
    expanded: ExpandedKv,
    tiles: Any,
    starts: Any,
    out: Any,
    carry: Carry,
    begin: int,
    scale: float,
    *,
    tiling: HopperAttentionTiling,
) -> None:
    """Attends as `mla_expanded` does. Scores in `carry` are not multiplied by the scale, so the other kernel cannot go
    on from there."""
    heads, room, nope = expanded.k.shape
    rope, v_dim = expanded.rope.shape[1], expanded.v.shape[2]
    together = min(max(RESIDENT.value // (2 * (nope + v_dim) * room), 1), heads)
    config = HopperMlaConfig(heads, nope, rope, v_dim, room, together, *tiling)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    lines = expanded.k.view(heads * room, nope), expanded.rope, expanded.v.view(heads * room, v_dim)
    _hopper_mla[(heads * len(tiles),)](
        *(TensorDescriptor.from_tensor(each, [tiling.tile, COLUMNS.value], layout) for each in lines),
        *(q, tiles, starts, len(tiles), begin, out, carry, scale * LOG2E),
        CONFIG=config,
        **launch_options(WARPS, 1),
    )

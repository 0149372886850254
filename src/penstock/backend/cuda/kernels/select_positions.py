"""The index of sparse attention (DSA): scores the positions that a token sees, and selects those it attends to.

Index keys are [blocks, block_size, D], in the type of activations. Work comes as splits or tiles
(inputs.py). Some of them are scored at a time, each token on a line of `scores`, [LINES, positions of the cache]. A
token that sees at most top_k positions selects all of them, and nothing is scored for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.kv_tile import PagedKv, table_of
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.rope import RopeInputs, angle_of, rotate_pair

LINES = 32  # tokens that are scored at a time
CHUNKS = 64  # programs that share the context of a token, at most
HEADS = tl.constexpr(16)  # rotated by one program
TILE = tl.constexpr(64)  # positions that are scored at a time
KEYS = tl.constexpr(1024)  # scores that are read at a time


class IndexShape(NamedTuple):
    """Holds the constants of an index, and of how it is cut up."""

    heads: int
    dims: int
    pairs: int
    top_k: int
    block_size: int
    block_h: int  # heads rounded up to a power of two
    block_d: int
    block_p: int
    tokens: int  # most tokens of a split or tile
    columns: int  # columns of splits or tiles


@triton.jit
def _store_index(q, k, rope, cache, SHAPE: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr):
    """The first program of a token stores its key; the others rotate queries."""
    let_next_start(PDL)
    PAIRS: tl.constexpr = SHAPE.pairs
    DIMS: tl.constexpr = SHAPE.dims
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, SHAPE.block_p)
    angle = angle_of(tl.load(rope.positions + token), tl.load(rope.inv_freq + pair, pair < PAIRS, 0.0))
    cos, sin = tl.cos(angle)[None, :] * rope.scale, tl.sin(angle)[None, :] * rope.scale
    left = pair[None, :] * 2 if INTERLEAVED else pair[None, :]
    right = pair[None, :] * 2 + 1 if INTERLEAVED else pair[None, :] + PAIRS
    place = tl.load(rope.places + token).to(tl.int64)
    wait_for_previous(PDL)
    head = tl.maximum(tl.program_id(1) - 1, 0) * HEADS + tl.arange(0, HEADS)
    source = q + (token * SHAPE.heads + head)[:, None] * DIMS
    target, wanted = source, head < SHAPE.heads
    if tl.program_id(1) == 0:
        source, target = k + token * DIMS + head[:, None] * 0, cache + place * DIMS + head[:, None] * 0
        wanted = head == 0
        d = tl.arange(0, SHAPE.block_d)
        rest = (d >= 2 * PAIRS) & (d < DIMS)
        tl.store(cache + place * DIMS + d, tl.load(k + token * DIMS + d, rest, 0.0), rest)
    inside = wanted[:, None] & (pair < PAIRS)[None, :]
    a = tl.load(source + left, inside, 0.0).to(tl.float32)
    b = tl.load(source + right, inside, 0.0).to(tl.float32)
    a, b = rotate_pair(a, b, cos, sin)
    tl.store(target + left, a.to(q.dtype.element_ty), inside)
    tl.store(target + right, b.to(q.dtype.element_ty), inside)


@triton.jit
def load_work(work, item, index, COLUMNS: tl.constexpr):
    """Returns a token, its row of block tables and its position; -1 for a token that is not there. The splits of one
    context are one item, which the first of them stands for."""
    at = work + item * COLUMNS
    token, row = tl.load(at), tl.load(at + 1)
    if COLUMNS == 8:
        tokens = tl.load(at + 7)
        first = tl.load(at + 4) - tokens
        tokens = tl.where(tl.load(at + 2) == 0, tokens, 0)
    else:
        first, tokens = tl.load(at + 2), tl.load(at + 3)
    token = tl.where((token >= 0) & (index < tokens), token + index, -1)
    return token.to(tl.int64), row, first + index


@triton.jit(do_not_specialize=["first"])
def _index_scores(q, weights, keys, work, first, scores, room, SHAPE: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    COUNT: tl.constexpr = SHAPE.heads
    DIMS: tl.constexpr = SHAPE.dims
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    wait_for_previous(PDL)
    token, row, own = load_work(work, first + tl.program_id(0), tl.program_id(1), SHAPE.columns)
    if token < 0:
        return
    if own < SHAPE.top_k:
        return
    table = table_of(keys, row)
    line = scores + (tl.program_id(0) * SHAPE.tokens + tl.program_id(1)).to(tl.int64) * room
    head, d = tl.arange(0, SHAPE.block_h), tl.arange(0, SHAPE.block_d)
    wanted = (head < COUNT)[:, None] & (d < DIMS)[None, :]
    query = tl.load(q + (token * COUNT + head)[:, None] * DIMS + d[None, :], wanted, 0.0)
    weight = tl.load(weights + token * COUNT + head, head < COUNT, 0.0).to(tl.float32)
    for start in tl.range(tl.program_id(2) * TILE, own + 1, tl.num_programs(2) * TILE):
        position = start + tl.arange(0, TILE)
        seen = position <= own
        block = tl.load(table + position // BLOCK_SIZE, seen, 0).to(tl.int64)
        at = keys.lines + (block * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * DIMS + d[None, :]
        key = tl.load(at, seen[:, None] & (d < DIMS)[None, :], 0.0)
        score = tl.maximum(tl.dot(query, tl.trans(key), input_precision="ieee"), 0.0)
        tl.store(line + position, tl.sum(score * weight[:, None], 0), seen)


@triton.jit
def load_ordered(line, position, seen):
    """Returns scores as whole numbers that have the same order; NaN comes last."""
    score = tl.load(line + position, seen, 0.0)
    score = tl.where(score == score, score, -float("inf"))
    score = tl.where(score == 0, 0.0, score)  # the two zeros are equal
    bits = score.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >= 0x80000000, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def find_threshold(line, count, TOP_K: tl.constexpr):
    """Returns the lowest score that is selected, as `load_ordered` returns it, and how many of those that are equal to
    it. It is found eight bits at a time."""
    bin = tl.arange(0, 256)
    threshold = tl.zeros([], tl.uint32)
    left = tl.full([], TOP_K, tl.int32)
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([256], tl.int32)
        for start in tl.range(0, count, KEYS):
            position = start + tl.arange(0, KEYS)
            seen = position < count
            key = load_ordered(line, position, seen)
            if shift < 24:
                seen &= (key >> (shift + 8)) == threshold
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=seen)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        chosen = (above < left) & (above + counts >= left)
        threshold = (threshold << 8) | tl.sum(tl.where(chosen, bin, 0), 0).to(tl.uint32)
        left -= tl.sum(tl.where(chosen, above, 0), 0)
    return threshold, left


@triton.jit(do_not_specialize=["first"])
def _select_positions(scores, work, first, room, out, SHAPE: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    TOP_K: tl.constexpr = SHAPE.top_k
    wait_for_previous(PDL)
    token, _, own = load_work(work, first + tl.program_id(0), tl.program_id(1), SHAPE.columns)
    if token < 0:
        return
    if own < TOP_K:
        for start in tl.range(0, own + 1, KEYS):
            position = start + tl.arange(0, KEYS)
            tl.store(out + token * TOP_K + position, position.to(tl.float32), position <= own)
        return
    line = scores + (tl.program_id(0) * SHAPE.tokens + tl.program_id(1)).to(tl.int64) * room
    threshold, left = find_threshold(line, own + 1, TOP_K)
    written, equals = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in tl.range(0, own + 1, KEYS):
        position = start + tl.arange(0, KEYS)
        seen = position <= own
        key = load_ordered(line, position, seen)
        equal = (seen & (key == threshold)).to(tl.int32)
        taken = seen & ((key > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) + equals <= left)))
        at = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(out + token * TOP_K + at, position.to(tl.float32), taken)
        written += tl.sum(taken.to(tl.int32), 0)
        equals += tl.sum(equal, 0)


def store_index(
    q: Any, k: Any, inv_freq: Any, pairs: int, rope_scale: float, interleaved: bool, step: Any, cache: Any
) -> None:
    """Rotates q [T, heads * D] in place, and stores k [T, D], rotated, at the step's places."""
    shape = shape_of(q, k.shape[1], pairs, 0, cache, 1, 0)
    rope = RopeInputs(inv_freq, step.positions, step.places, rope_scale)
    grid = (len(q), 1 + triton.cdiv(shape.heads, HEADS.value))
    _store_index[grid](q, k, rope, cache, SHAPE=shape, INTERLEAVED=interleaved, **launch_options())


def select_positions(
    q: Any, weights: Any, cache: Any, work: Any, tables: Any, header: Any, tokens: int, scores: Any, out: Any
) -> None:
    """Writes the positions that tokens attend to, for splits [P, 8] or tiles [Q, 5] of at most `tokens` tokens, with
    queries that are rotated and keys that are stored."""
    shape = shape_of(q, cache.shape[2], 0, out.shape[1], cache, tokens, work.shape[1])
    keys, each = PagedKv(cache, cache, tables, header), max(LINES // tokens, 1)
    for first in range(0, len(work), each):
        grid, room = (min(each, len(work) - first), tokens), scores.shape[1]
        chunks = min(CHUNKS, triton.cdiv(room, TILE.value))
        _index_scores[(*grid, chunks)](q, weights, keys, work, first, scores, room, SHAPE=shape, **launch_options())
        _select_positions[grid](scores, work, first, room, out, SHAPE=shape, **launch_options())


def shape_of(q: Any, dims: int, pairs: int, top_k: int, cache: Any, tokens: int, columns: int) -> IndexShape:
    heads = q.shape[1] // dims
    block_h, block_d, block_p = (max(triton.next_power_of_2(count), 16) for count in (heads, dims, pairs))
    return IndexShape(heads, dims, pairs, top_k, cache.shape[1], block_h, block_d, block_p, tokens, columns)

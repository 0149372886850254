"""The gated delta rule in chunks: a prompt's changes to a state are computed with matrix products.

A token changes a state S by k u, where u = beta * (v - k g S) and g is its gate. Within a chunk, each u depends on
those before it by way of the products of keys, so the chunk's u solve a triangular system:

    (1 + A) U = beta * (V - decayed K S),   A[i, j] = beta[i] * (k[i] . k[j]) * decay from j to i,   j < i

This is the WY form of the product of the chunk's factors (the UT transform). Neither 1 + A nor the scores of queries
against keys depend on S: a first kernel inverts the one and stores both, for all chunks at once. A second one takes
each state through its chunks, and moves it on once for each: S = decayed S + decayed K' U. Decays are differences of
sums of logarithms, from a token to a later one, so that none is above 1. The system is inverted by elimination, column
by column: powers of A would cancel each other where keys are alike.

Products run on tensor cores with TF32 in three parts (3xTF32), which is about as exact as float32; states stay in
float32. A row is divided where its positions are multiples of CHUNK, and where a state is saved, so that most chunks
are the same however a prompt is divided into steps. Results still differ from those token by token in their last bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.causal_conv import StateRows
from penstock.backend.cuda.kernels.delta_rule import Gates, HeadSizes, key_head_of, softplus
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.model.recurrence import CHUNK, MAX_CHUNKED_KEYS

COLUMNS = 16  # state columns per program: more spill registers
TF32 = tl.constexpr("tf32x3")


@triton.jit
def _load_keys(mixed, chunk, begin, SIZES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr):
    """Returns KEYS columns of the queries and keys of a chunk, from `begin` on: [CHUNK, KEYS], 0 where there are none.
    A chunk is its first token, the number of its tokens, and the value head."""
    first, count, head = chunk
    WIDTH: tl.constexpr = 2 * SIZES.k_heads * SIZES.k_dim + SIZES.v_heads * SIZES.v_dim
    i, key = tl.arange(0, CHUNK)[:, None], begin + tl.arange(0, KEYS)[None, :]
    inside = (i < count) & (key < SIZES.k_dim)
    queries = mixed + (first + i) * WIDTH + key_head_of(head, SIZES) * SIZES.k_dim + key
    return tl.load(queries, inside, 0.0), tl.load(queries + SIZES.k_heads * SIZES.k_dim, inside, 0.0)


@triton.jit
def _decays(gates, chunk, CHUNK: tl.constexpr):
    """Returns the logarithm of how much a state from before the chunk has decayed after each token, [CHUNK, 1], and
    after all."""
    alpha, dt, rate, stride = gates
    first, count, head = chunk
    token = tl.arange(0, CHUNK)
    x = tl.load(dt + head) + tl.load(alpha + (first + token) * stride + head, token < count, 0.0).to(tl.float32)
    at = tl.cumsum(tl.where(token < count, rate * softplus(x), 0.0), 0)
    whole = tl.sum(tl.where(token == CHUNK - 1, at, 0.0), 0)  # a sum of its own would be rounded to something else
    return at[:, None], whole


@triton.jit
def _products(mixed, gates, chunk, SIZES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the products of a chunk's keys, and of its queries, with its keys, decayed from the key's token to the
    other one: [CHUNK, CHUNK] each, right on and below the diagonal."""
    among, scores = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    PART: tl.constexpr = 32 if KEYS > 32 else KEYS  # more of them in registers would be spilled
    for begin in range(0, KEYS, PART):
        q, k = _load_keys(mixed, chunk, begin, SIZES, PART, CHUNK)
        among = tl.dot(k, tl.trans(k), among, input_precision=TF32)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=TF32)
    at, _ = _decays(gates, chunk, CHUNK)
    since = tl.exp(tl.minimum(at - tl.trans(at), 0.0))
    return among * since, scores * since


@triton.jit
def _solve_chunks(
    mixed,
    beta,
    alpha,
    log_decay,
    dt,
    chunks,
    inverses,
    scores,
    strides,
    SIZES: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    beta_stride, alpha_stride = strides
    chunk = chunks + tl.program_id(0) * 2
    count = tl.load(chunk + 1)
    if count > 0:
        first = tl.load(chunk).to(tl.int64)
        head = tl.program_id(1)
        i = tl.arange(0, CHUNK)
        share = tl.load(beta + (first + i) * beta_stride + head, i < count, 0.0).to(tl.float32)
        share = tl.where(i < count, 1.0 / (1.0 + tl.exp(-share)), 0.0)
        gates, here = (alpha, dt, tl.load(log_decay + head), alpha_stride), (first, count, head)
        among, read = _products(mixed, gates, here, SIZES, KEYS, CHUNK)
        row, column = i[:, None], i[None, :]
        among = tl.where(row > column, among * share[:, None], 0.0)
        inverse = tl.where(row == column, 1.0, 0.0)
        for token in range(count):
            below = tl.sum(tl.where(column == token, among, 0.0), 1)
            above = tl.sum(tl.where(row == token, inverse, 0.0), 0)
            inverse -= below[:, None] * above[None, :]
        place = (first + row) * (SIZES.v_heads * CHUNK) + head * CHUNK + column
        tl.store(inverses + place, inverse * share[None, :], row < count)
        tl.store(scores + place, tl.where(row >= column, read, 0.0), row < count)


@triton.jit
def _state_rows(begin, column, head, SIZES: tl.constexpr, KEYS: tl.constexpr):
    key = begin + tl.arange(0, KEYS)[:, None]
    place = head * SIZES.k_dim * SIZES.v_dim + key * SIZES.v_dim + column
    return place, (key < SIZES.k_dim) & (column < SIZES.v_dim)


@triton.jit
def _read(mixed, gates, chunk, begin, state, seen, read, SIZES: tl.constexpr, CHUNK: tl.constexpr):
    """Adds what keys and queries find in some rows of a state from before the chunk, which begin with `begin`."""
    KEYS: tl.constexpr = state.shape[0]
    q, k = _load_keys(mixed, chunk, begin, SIZES, KEYS, CHUNK)
    at, _ = _decays(gates, chunk, CHUNK)
    decay = tl.exp(at)
    return tl.dot(k * decay, state, seen, input_precision=TF32), tl.dot(q * decay, state, read, input_precision=TF32)


@triton.jit
def _move_on(mixed, gates, chunk, begin, update, state, SIZES: tl.constexpr, CHUNK: tl.constexpr):
    KEYS: tl.constexpr = state.shape[0]
    _, k = _load_keys(mixed, chunk, begin, SIZES, KEYS, CHUNK)
    at, whole = _decays(gates, chunk, CHUNK)
    kept = tl.trans(k * tl.exp(whole - at))
    return tl.dot(kept, update, state * tl.exp(whole), input_precision=TF32)


@triton.jit
def _take_through(
    mixed, gates, chunk, solved, column, upper, lower, out, SIZES: tl.constexpr, TWO: tl.constexpr, CHUNK: tl.constexpr
):
    """Takes some columns of a state through a chunk. The state has an upper half and, if there are TWO, a lower one:
    the operands of both together would not fit into registers, nor would keys that are not loaded anew."""
    HALF: tl.constexpr = upper.shape[0]
    K_WIDTH: tl.constexpr = SIZES.k_heads * SIZES.k_dim
    V_WIDTH: tl.constexpr = SIZES.v_heads * SIZES.v_dim
    first, count, head = chunk
    inverses, scores = solved
    i = tl.arange(0, CHUNK)[:, None]
    here, known = (first + i), (i < count) & (column < SIZES.v_dim)
    none = tl.zeros((CHUNK, upper.shape[1]), tl.float32)
    seen, read = _read(mixed, gates, chunk, 0, upper, none, none, SIZES, CHUNK)
    if TWO:
        seen, read = _read(mixed, gates, chunk, HALF, lower, seen, read, SIZES, CHUNK)
    place = head * SIZES.v_dim + column
    v = tl.load(mixed + here * (2 * K_WIDTH + V_WIDTH) + 2 * K_WIDTH + place, known, 0.0)
    pair = here * (SIZES.v_heads * CHUNK) + head * CHUNK + tl.arange(0, CHUNK)[None, :]
    update = tl.dot(tl.load(inverses + pair, i < count, 0.0), v - seen, input_precision=TF32)
    read = tl.dot(tl.load(scores + pair, i < count, 0.0), update, read, input_precision=TF32)
    tl.store(out + here * V_WIDTH + place, read, known)
    upper = _move_on(mixed, gates, chunk, 0, update, upper, SIZES, CHUNK)
    if TWO:
        lower = _move_on(mixed, gates, chunk, HALF, update, lower, SIZES, CHUNK)
    return upper, lower


@triton.jit
def _delta_chunks(
    mixed,
    alpha,
    log_decay,
    dt,
    states,
    rows,
    chunks,
    inverses,
    scores,
    out,
    strides,
    SIZES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    alpha_stride, state_stride = strides
    row = rows + tl.program_id(0) * SIZES.fields
    parts = tl.load(row + 7)
    if parts > 0:
        begin, own = tl.load(row + 3).to(tl.int64), tl.load(row + 2).to(tl.int64)
        save, after = tl.load(row + 4).to(tl.int64), tl.load(row) + tl.load(row + 5)
        chunk, head = chunks + tl.load(row + 6) * 2, tl.program_id(1)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        high, is_high = _state_rows(0, column, head, SIZES, HALF)
        low, is_low = _state_rows(HALF, column, head, SIZES, HALF)
        upper = tl.load(states + begin * state_stride + high, is_high & (begin >= 0), 0.0)
        lower = tl.load(states + begin * state_stride + low, is_low & (begin >= 0), 0.0)
        gates, solved = (alpha, dt, tl.load(log_decay + head), alpha_stride), (inverses, scores)
        for part in range(parts):
            first, count = tl.load(chunk + 2 * part).to(tl.int64), tl.load(chunk + 2 * part + 1)
            here = first, count, head
            upper, lower = _take_through(
                mixed, gates, here, solved, column, upper, lower, out, SIZES, KEYS > HALF, CHUNK
            )
            if (first + count == after) & (save >= 0):
                tl.store(states + save * state_stride + high, upper, is_high)
                tl.store(states + save * state_stride + low, lower, is_low)
        tl.store(states + own * state_stride + high, upper, is_high)
        tl.store(states + own * state_stride + low, lower, is_low)


def delta_chunks(
    mixed: Any,
    gates: Gates,
    sizes: HeadSizes,
    states: Any,
    rows: StateRows,
    inverses: Any,
    scores: Any,
    out: Any,
) -> None:
    """Takes states through those rows that are divided into chunks. `inverses` and `scores` are [T, v_heads * CHUNK]
    float32, and are written."""
    keys = max(triton.next_power_of_2(sizes.k_dim), 16)
    inputs = mixed, *gates, rows.chunks, inverses, scores
    _solve_chunks[(len(rows.chunks), sizes.v_heads)](
        *(*inputs, gates.strides),
        SIZES=sizes,
        KEYS=keys,
        CHUNK=CHUNK,
        **launch_options(4, num_stages=1),
    )
    columns = min(COLUMNS, max(triton.next_power_of_2(sizes.v_dim), 16))
    _delta_chunks[(len(rows.numbers), sizes.v_heads, triton.cdiv(sizes.v_dim, columns))](
        *(mixed, *gates[1:], states, rows.numbers, rows.chunks, inverses, scores, out),
        (gates.alpha.stride(0), states.stride(0)),
        SIZES=sizes,
        KEYS=keys,
        HALF=min(keys, MAX_CHUNKED_KEYS // 2),
        COLUMNS=columns,
        CHUNK=CHUNK,
        **launch_options(4, num_stages=1),
    )

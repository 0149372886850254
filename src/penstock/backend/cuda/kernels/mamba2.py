"""Mamba2: each row's tokens pass through the states of its heads, which stay in registers.

A head's state [state_dim, head_dim] decays by one number for each token and takes in the outer product of B and x * dt;
C reads it. Its columns depend on nothing but themselves, B and C, so a program has some columns of one head. Rows of a
few tokens are computed token by token. Longer rows are computed in chunks: within a chunk each token attends to those
before it, weighted by how much a state would have decayed since (state space duality), and the state moves on once per
chunk. Rows that only pad a step have no tokens, and touch no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.causal_conv import ROW_FIELDS, ConvSizes, StateRows, causal_conv, store_conv_state
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.silu_and_mul import silu
from penstock.model.ops import Mamba2Weights
from penstock.model.recurrence import Mamba2Spec

COLUMNS = 16  # state columns per program
CHUNK = 64  # tokens
CHUNK_COLUMNS = 32
PART = 64  # rows of a state that are multiplied together
TF32 = tl.constexpr("tf32x3")  # float32 in three terms, on the tensor cores
LEAST_CHUNKED = 16  # tokens of a row that is computed in chunks
MAX_TOKENS = 2**31 - 1


class ScanSizes(NamedTuple):
    """Holds the constants of a selective scan."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    fields: int = ROW_FIELDS


class Mamba2Scratch(NamedTuple):
    """Holds intermediate results of one step's kernels, in float32."""

    mixed: Any  # [T, x + B + C] convolved
    raw: Any  # [T, x] read from states


@triton.jit
def _time_step(x, least, most):
    dt = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return tl.minimum(tl.maximum(dt, least), most)


@triton.jit
def _selective_scan(
    mixed,
    zxbcdt,
    rates,
    dt_bias,
    skip,
    states,
    rows,
    out,
    state_stride,
    dt_scale,
    dt_min,
    dt_max,
    SIZES: tl.constexpr,
    STATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    HEADS: tl.constexpr = SIZES.heads
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    STATE_DIM: tl.constexpr = SIZES.state_dim
    INNER: tl.constexpr = HEADS * HEAD_DIM
    WIDTH: tl.constexpr = INNER + 2 * SIZES.groups * STATE_DIM
    STRIDE: tl.constexpr = INNER + WIDTH + HEADS
    row = rows + tl.program_id(0) * SIZES.fields
    count = tl.load(row + 1)
    if (count > 0) & (count <= MOST):
        first = tl.load(row).to(tl.int64)
        own, begin = tl.load(row + 2).to(tl.int64), tl.load(row + 3).to(tl.int64)
        save, after = tl.load(row + 4).to(tl.int64), tl.load(row + 5)
        head = tl.program_id(1)
        group = head // (HEADS // SIZES.groups)
        i = tl.arange(0, STATE)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (i < STATE_DIM)[:, None] & (column < HEAD_DIM)[None, :]
        place = head * STATE_DIM * HEAD_DIM + i[:, None] * HEAD_DIM + column[None, :]
        state = tl.load(states + begin * state_stride + place, inside & (begin >= 0), 0.0)
        rate, bias, direct = tl.load(rates + head), tl.load(dt_bias + head), tl.load(skip + head)
        inputs = mixed + first * WIDTH + head * HEAD_DIM + column
        keys = mixed + first * WIDTH + INNER + group * STATE_DIM + i
        delays = zxbcdt + first * STRIDE + INNER + WIDTH + head
        to = out + first * INNER + head * HEAD_DIM + column
        for token in range(count):
            x = tl.load(inputs + token * WIDTH, column < HEAD_DIM, 0.0)
            b = tl.load(keys + token * WIDTH, i < STATE_DIM, 0.0)
            c = tl.load(keys + token * WIDTH + SIZES.groups * STATE_DIM, i < STATE_DIM, 0.0)
            raw = tl.load(delays + token * STRIDE).to(tl.float32) * dt_scale + bias
            dt = _time_step(raw, dt_min, dt_max)
            state = state * tl.exp(rate * dt) + b[:, None] * (x * dt)[None, :]
            tl.store(to + token * INNER, tl.sum(state * c[:, None], 0) + direct * x, column < HEAD_DIM)
            if (token + 1 == after) & (save >= 0):
                tl.store(states + save * state_stride + place, state, inside)
        tl.store(states + own * state_stride + place, state, inside)


@triton.jit
def _state_part(part, column, head, SIZES: tl.constexpr, PART: tl.constexpr):
    i = part * PART + tl.arange(0, PART)[:, None]
    place = head * SIZES.state_dim * SIZES.head_dim + i * SIZES.head_dim + column
    return place, (i < SIZES.state_dim) & (column < SIZES.head_dim)


@triton.jit
def _load_state(state, there, column, head, SIZES: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    parts = ()
    for part in tl.static_range(PARTS):
        place, inside = _state_part(part, column, head, SIZES, PART)
        parts += (tl.load(state + place, inside & there, 0.0),)  # type: ignore[assignment]
    return parts


@triton.jit
def _store_state(to, state, column, head, SIZES: tl.constexpr, PART: tl.constexpr):
    for part in tl.static_range(len(state)):
        place, inside = _state_part(part, column, head, SIZES, PART)
        tl.store(to + place, state[part], inside)


@triton.jit
def _decays(delays, count, bias, rate, scaling, SIZES: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the time steps of a chunk's tokens, and how much a state from before the chunk has decayed after each of
    them and after all, as exponents. Tokens that the chunk does not have take no time."""
    scale, least, most = scaling
    STRIDE: tl.constexpr = 2 * SIZES.heads * SIZES.head_dim + 2 * SIZES.groups * SIZES.state_dim + SIZES.heads
    i = tl.arange(0, CHUNK)
    raw = tl.load(delays + i * STRIDE, i < count, 0.0).to(tl.float32)
    steps = tl.where(i < count, _time_step(raw * scale + bias, least, most), 0.0)
    return steps, tl.cumsum(steps * rate, 0), tl.sum(steps * rate, 0)


@triton.jit
def _load_keys(keys, count, part, SIZES: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr):
    WIDTH: tl.constexpr = SIZES.heads * SIZES.head_dim + 2 * SIZES.groups * SIZES.state_dim
    i, k = tl.arange(0, CHUNK)[:, None], part * PART + tl.arange(0, PART)[None, :]
    return tl.load(keys + i * WIDTH + k, (i < count) & (k < SIZES.state_dim), 0.0)


@triton.jit
def _read_chunk(x, keys, count, decays, state, SIZES: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the output of a chunk's tokens, from the state and from each other. The state is in parts of PART rows,
    since the operands of all together would not fit into registers."""
    steps, at, _ = decays
    READS: tl.constexpr = SIZES.groups * SIZES.state_dim  # where C is, after B
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    read = tl.zeros([CHUNK, x.shape[1]], tl.float32)
    for part in tl.static_range(len(state)):
        c = _load_keys(keys + READS, count, part, SIZES, PART, CHUNK)
        read = tl.dot(c, state[part], read, input_precision=TF32)
        scores = tl.dot(c, tl.trans(_load_keys(keys, count, part, SIZES, PART, CHUNK)), scores, input_precision=TF32)
    i = tl.arange(0, CHUNK)
    earlier = i[:, None] >= i[None, :]
    since = tl.exp(tl.where(earlier, at[:, None] - at[None, :], 0.0))
    scores *= tl.where(earlier, since * steps[None, :], 0.0)
    return tl.dot(scores, x, read * tl.exp(at)[:, None], input_precision=TF32)


@triton.jit
def _move_on(x, keys, count, decays, state, SIZES: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr):
    steps, at, whole = decays
    after = ()
    for part in tl.static_range(len(state)):
        b = _load_keys(keys, count, part, SIZES, PART, CHUNK) * (tl.exp(whole - at) * steps)[:, None]
        after += (tl.dot(tl.trans(b), x, state[part] * tl.exp(whole), input_precision=TF32),)  # type: ignore[assignment]
    return after


@triton.jit
def _chunked_scan(
    mixed,
    zxbcdt,
    rates,
    dt_bias,
    skip,
    states,
    rows,
    out,
    state_stride,
    dt_scale,
    dt_min,
    dt_max,
    SIZES: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    INNER: tl.constexpr = SIZES.heads * HEAD_DIM
    WIDTH: tl.constexpr = INNER + 2 * SIZES.groups * SIZES.state_dim
    STRIDE: tl.constexpr = INNER + WIDTH + SIZES.heads
    row = rows + tl.program_id(0) * SIZES.fields
    count = tl.load(row + 1)
    if count >= LEAST:
        first = tl.load(row).to(tl.int64)
        own, begin = tl.load(row + 2).to(tl.int64), tl.load(row + 3).to(tl.int64)
        save, head = tl.load(row + 4).to(tl.int64), tl.program_id(1)
        after = tl.where(save >= 0, tl.load(row + 5), count)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        state = _load_state(states + begin * state_stride, begin >= 0, column, head, SIZES, PARTS, PART)
        rate, bias = tl.load(rates + head), tl.load(dt_bias + head)
        key = INNER + head // (SIZES.heads // SIZES.groups) * SIZES.state_dim
        before = tl.cdiv(after, CHUNK)  # chunks up to where the state is saved, which ends one
        for number in range(before + tl.cdiv(count - after, CHUNK)):
            start = tl.where(number < before, number * CHUNK, after + (number - before) * CHUNK)
            end = tl.minimum(start + CHUNK, tl.where(number < before, after, count))
            known = end - start
            delays, tokens = zxbcdt + (first + start) * STRIDE + INNER + WIDTH + head, mixed + (first + start) * WIDTH
            decays = _decays(delays, known, bias, rate, (dt_scale, dt_min, dt_max), SIZES, CHUNK)
            i = tl.arange(0, CHUNK)[:, None]
            inside, place = (i < known) & (column < HEAD_DIM), head * HEAD_DIM + column
            x = tl.load(tokens + i * WIDTH + place, inside, 0.0)
            read = _read_chunk(x, tokens + key, known, decays, state, SIZES, PART, CHUNK)
            tl.store(out + (first + start) * INNER + i * INNER + place, read + tl.load(skip + head) * x, inside)
            state = _move_on(x, tokens + key, known, decays, state, SIZES, PART, CHUNK)
            if (end == after) & (save >= 0):
                _store_state(states + save * state_stride, state, column, head, SIZES, PART)
        _store_state(states + own * state_stride, state, column, head, SIZES, PART)


@triton.jit
def _gate_and_norm(
    raw,
    zxbcdt,
    gain,
    out,
    eps,
    z_scale,
    stride,
    inner,
    width,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    column = tl.program_id(1) * width + d
    inside = (d < width) & (column < inner)
    value = tl.load(raw + token * inner + column, inside, 0.0)
    z = tl.load(zxbcdt + token * stride + column, inside, 0.0).to(tl.float32)
    value = value * silu(z * z_scale)
    if NORM:
        value = value / tl.sqrt(tl.sum(value * value, 0) / width + eps) * tl.load(gain + column, inside, 0.0)
    tl.store(out + token * inner + column, value.to(out.dtype.element_ty), inside)


def mamba2(
    zxbcdt: Any,
    weights: Mamba2Weights,
    spec: Mamba2Spec,
    states: Any,
    rows: StateRows,
    scratch: Mamba2Scratch,
    out: Any,
    prompts: bool = True,
    fixed: bool = False,
) -> None:
    """Computes Mamba2: [T, z + x + B + C + dt] -> [T, x]; `states` is [states, state_floats] float32. `prompts`: rows
    may have many tokens, which are computed in chunks. `fixed`: see delta_rule.py."""
    conv = ConvSizes.of(spec.conv_width, spec.width, spec.in_width, spec.state_dim * spec.inner, column=spec.inner)
    causal_conv(zxbcdt, weights.conv, weights.conv_bias, conv, states, rows, scratch.mixed)
    inputs = (
        *(scratch.mixed, zxbcdt, weights.decay, weights.dt_bias, weights.skip, states, rows.numbers, scratch.raw),
        *(states.stride(0), spec.dt_scale, spec.dt_min, spec.dt_max),
    )
    sizes = ScanSizes(spec.heads, spec.head_dim, spec.state_dim, spec.groups)
    padded = triton.next_power_of_2(spec.state_dim)
    columns = min(COLUMNS, triton.next_power_of_2(spec.head_dim))
    most = LEAST_CHUNKED - 1 if prompts else MAX_TOKENS
    scan = {"SIZES": sizes, "STATE": padded, "COLUMNS": columns, "MOST": most, "enable_fp_fusion": not fixed}
    _selective_scan[(len(rows.numbers), spec.heads, triton.cdiv(spec.head_dim, columns))](
        *inputs, **scan, **launch_options(1)
    )
    if prompts:
        grid = (len(rows.numbers), spec.heads, triton.cdiv(spec.head_dim, CHUNK_COLUMNS))
        part = max(min(padded, PART), 16)
        parts = {"PARTS": triton.cdiv(padded, part), "PART": part}
        tiles = {"COLUMNS": CHUNK_COLUMNS, "CHUNK": CHUNK, "LEAST": LEAST_CHUNKED, **parts}
        _chunked_scan[grid](*inputs, SIZES=sizes, **tiles, **launch_options(4, num_stages=1))
    store_conv_state(zxbcdt, conv, states, rows)
    gate_and_norm(zxbcdt, weights, spec, scratch.raw, out)


def gate_and_norm(zxbcdt: Any, weights: Mamba2Weights, spec: Mamba2Spec, raw: Any, out: Any) -> None:
    normed = weights.gain is not None
    width = spec.inner // spec.norm_groups if normed else min(spec.inner, 1024)
    block = triton.next_power_of_2(width)
    _gate_and_norm[(len(out), triton.cdiv(spec.inner, width))](
        *(raw, zxbcdt, weights.gain if normed else raw, out, spec.eps, spec.z_scale, spec.in_width, spec.inner, width),
        NORM=normed,
        BLOCK=block,
        **launch_options(min(max(block // 512, 1), 8)),
    )

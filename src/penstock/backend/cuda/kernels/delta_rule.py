"""Gated delta nets: each row's tokens pass one by one through the memories of its heads, which stay in registers.

A memory's columns depend on nothing but themselves, the keys and the queries, so a program has a few columns of one
head. What does not depend on the token before is computed for all tokens at once, ahead of that: the convolution, and
the length of keys and queries. Rows that only pad a step have no tokens, and touch no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.silu_and_mul import silu
from penstock.model.ops import DeltaWeights
from penstock.model.spec import DeltaSpec

ROW_FIELDS = (
    8  # first token, tokens, own state, state to begin with or -1, state to save to or -1, after how many tokens
)
COLUMNS = 16  # of a memory, in one program


class StateRows(NamedTuple):
    """What the rows of a step are."""

    numbers: Any  # [R, ROW_FIELDS]
    of_tokens: Any  # [T] the row of each token, -1 for one that only pads


@triton.jit
def _window(x, stride, before, width, exists, end, channel, inside, TAPS: tl.constexpr, HAS: tl.constexpr):
    """Inputs of the convolution that ends before token `end` of a row: those before the row are of its state."""
    tap = tl.arange(0, HAS)[:, None]
    index = end - TAPS + tap
    known = inside & (tap < TAPS)
    mine = tl.load(x + index * stride + channel, known & (index >= 0), 0.0).to(tl.float32)
    return mine + tl.load(before + (index + TAPS - 1) * width + channel, known & (index < 0) & exists, 0.0)


@triton.jit
def _short_conv(
    qkvz,
    conv,
    states,
    rows,
    token_rows,
    mixed,
    state_stride,
    scale,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    HAS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of q, of k or of v."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    WIDTH: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    STRIDE: tl.constexpr = WIDTH + V_HEADS * V_DIM
    token = tl.program_id(0).to(tl.int64)
    row_index = tl.load(token_rows + token)
    if row_index >= 0:
        row = rows + row_index * FIELDS
        first = tl.load(row).to(tl.int64)
        begin = tl.load(row + 3).to(tl.int64)
        head = tl.program_id(1)
        is_key = head < 2 * K_HEADS
        d = tl.arange(0, BLOCK)
        at = tl.where(is_key, head * K_DIM, 2 * K_HEADS * K_DIM + (head - 2 * K_HEADS) * V_DIM)
        inside = d < tl.where(is_key, K_DIM, V_DIM)
        channel = (at + d)[None, :]
        before = states + begin * state_stride + V_HEADS * K_DIM * V_DIM
        tap = tl.arange(0, HAS)[:, None]
        taps = tl.load(conv + channel * TAPS + tap, inside[None, :] & (tap < TAPS), 0.0)
        seen = _window(
            qkvz + first * STRIDE,
            STRIDE,
            before,
            WIDTH,
            begin >= 0,
            token - first + 1,
            channel,
            inside[None, :],
            TAPS,
            HAS,
        )
        value = silu(tl.sum(seen * taps, 0))
        if is_key:
            value = value / tl.sqrt(tl.sum(value * value, 0) + 1e-6)
        if head < K_HEADS:
            value = value * scale
        tl.store(mixed + token * WIDTH + at + d, value, inside)


@triton.jit
def _delta_rule(
    mixed,
    ba,
    decay,
    dt,
    states,
    rows,
    out,
    state_stride,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    TILED: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = rows + tl.program_id(0) * FIELDS
    count = tl.load(row + 1)
    if count > 0:
        first = tl.load(row).to(tl.int64)
        own = tl.load(row + 2).to(tl.int64)
        begin = tl.load(row + 3).to(tl.int64)
        save = tl.load(row + 4).to(tl.int64)
        after = tl.load(row + 5)
        WIDTH: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
        head = tl.program_id(1)
        key_head = head % K_HEADS if TILED else head // (V_HEADS // K_HEADS)
        i = tl.arange(0, KEYS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (i < K_DIM)[:, None] & (column < V_DIM)[None, :]
        place = head * K_DIM * V_DIM + i[:, None] * V_DIM + column[None, :]
        memory = tl.load(states + begin * state_stride + place, inside & (begin >= 0), 0.0)
        fades = tl.load(decay + head)
        delay = tl.load(dt + head)
        queries = mixed + first * WIDTH + key_head * K_DIM + i
        values = mixed + first * WIDTH + 2 * K_HEADS * K_DIM + head * V_DIM + column
        gates = ba + first * 2 * V_HEADS + head
        to = out + first * V_HEADS * V_DIM + head * V_DIM + column
        for token in range(count):
            q = tl.load(queries + token * WIDTH, i < K_DIM, 0.0)
            k = tl.load(queries + token * WIDTH + K_HEADS * K_DIM, i < K_DIM, 0.0)
            v = tl.load(values + token * WIDTH, column < V_DIM, 0.0)
            beta = 1.0 / (1.0 + tl.exp(-tl.load(gates + token * 2 * V_HEADS).to(tl.float32)))
            alpha = tl.load(gates + token * 2 * V_HEADS + V_HEADS).to(tl.float32) + delay
            softplus = tl.where(alpha > 20.0, alpha, tl.log(1.0 + tl.exp(tl.minimum(alpha, 20.0))))
            memory = memory * tl.exp(fades * softplus)
            learned = beta * (v - tl.sum(memory * k[:, None], 0))
            memory = memory + k[:, None] * learned[None, :]
            tl.store(to + token * V_HEADS * V_DIM, tl.sum(memory * q[:, None], 0), column < V_DIM)
            if (token + 1 == after) & (save >= 0):
                tl.store(states + save * state_stride + place, memory, inside)
        tl.store(states + own * state_stride + place, memory, inside)


@triton.jit
def _store_conv_state(
    qkvz,
    states,
    rows,
    state_stride,
    memories,
    width,
    stride,
    TAPS: tl.constexpr,
    HAS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = rows + tl.program_id(0) * FIELDS
    count = tl.load(row + 1)
    if count > 0:
        x = qkvz + tl.load(row).to(tl.int64) * stride
        own = tl.load(row + 2).to(tl.int64)
        begin = tl.load(row + 3).to(tl.int64)
        save = tl.load(row + 4).to(tl.int64)
        channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        tap = tl.arange(0, HAS)[:, None]
        inside = (channel < width) & (tap > 0) & (tap < TAPS)
        before = states + begin * state_stride + memories
        saved = _window(x, stride, before, width, begin >= 0, tl.load(row + 5), channel, inside, TAPS, HAS)
        last = _window(x, stride, before, width, begin >= 0, count, channel, inside, TAPS, HAS)
        tl.debug_barrier()  # a state that begins with itself is read whole before it is written
        place = memories + (tap - 1) * width + channel
        tl.store(states + save * state_stride + place, saved, inside & (save >= 0))
        tl.store(states + own * state_stride + place, last, inside)


@triton.jit
def _gated_norm(raw, qkvz, gain, out, eps, width, V_DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    v_width = tl.num_programs(1) * V_DIM
    d = tl.arange(0, BLOCK)
    column = tl.program_id(1) * V_DIM + d
    value = tl.load(raw + token * v_width + column, d < V_DIM, 0.0)
    z = tl.load(qkvz + token * (width + v_width) + width + column, d < V_DIM, 0.0).to(tl.float32)
    normed = value / tl.sqrt(tl.sum(value * value, 0) / V_DIM + eps) * tl.load(gain + d, d < V_DIM, 0.0)
    tl.store(out + token * v_width + column, (normed * silu(z)).to(out.dtype.element_ty), d < V_DIM)


@triton.jit
def _sigmoid_mul(x, gate, out, width, ONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, inside, 0.0).to(tl.float32)
    by = tl.load(gate + row) if ONE else tl.load(gate + row * width + column, inside, 0.0)
    tl.store(out + row * width + column, (value / (1.0 + tl.exp(-by.to(tl.float32)))).to(out.dtype.element_ty), inside)


class DeltaScratch(NamedTuple):
    """Of one step, in float32."""

    mixed: Any  # [T, q + k + v] convolved
    raw: Any  # [T, v] read from memories


def delta_net(
    qkvz: Any,
    ba: Any,
    weights: DeltaWeights,
    spec: DeltaSpec,
    eps: float,
    states: Any,
    rows: StateRows,
    scratch: DeltaScratch,
    out: Any,
) -> None:
    """[T, q + k + v + z], [T, b + a] -> [T, v]. `states`: [states, state_floats] float32."""
    has = triton.next_power_of_2(spec.conv_width)
    _short_conv[(len(out), 2 * spec.k_heads + spec.v_heads)](
        qkvz,
        weights.conv,
        states,
        rows.numbers,
        rows.of_tokens,
        scratch.mixed,
        states.stride(0),
        spec.k_dim**-0.5,
        K_HEADS=spec.k_heads,
        V_HEADS=spec.v_heads,
        K_DIM=spec.k_dim,
        V_DIM=spec.v_dim,
        TAPS=spec.conv_width,
        HAS=has,
        BLOCK=triton.next_power_of_2(max(spec.k_dim, spec.v_dim)),
        FIELDS=ROW_FIELDS,
        **options(1),
    )
    columns = min(COLUMNS, triton.next_power_of_2(spec.v_dim))
    _delta_rule[(len(rows.numbers), spec.v_heads, triton.cdiv(spec.v_dim, columns))](
        scratch.mixed,
        ba,
        weights.decay,
        weights.dt_bias,
        states,
        rows.numbers,
        scratch.raw,
        states.stride(0),
        K_HEADS=spec.k_heads,
        V_HEADS=spec.v_heads,
        K_DIM=spec.k_dim,
        V_DIM=spec.v_dim,
        TILED=spec.tiled,
        KEYS=triton.next_power_of_2(spec.k_dim),
        COLUMNS=columns,
        FIELDS=ROW_FIELDS,
        **options(1),
    )
    if spec.conv_width > 1:
        _store_conv_state[(len(rows.numbers), triton.cdiv(spec.width, 256))](
            qkvz,
            states,
            rows.numbers,
            states.stride(0),
            spec.k_dim * spec.v_width,
            spec.width,
            spec.width + spec.v_width,
            TAPS=spec.conv_width,
            HAS=has,
            BLOCK=256,
            FIELDS=ROW_FIELDS,
            **options(1),
        )
    _gated_norm[(len(out), spec.v_heads)](
        scratch.raw,
        qkvz,
        weights.gain,
        out,
        eps,
        spec.width,
        V_DIM=spec.v_dim,
        BLOCK=triton.next_power_of_2(spec.v_dim),
        **options(1),
    )


def sigmoid_mul(x: Any, gate: Any, out: Any) -> None:
    """x * sigmoid(gate): [T, width] with [T, width] or [T, 1]."""
    count, width = x.shape
    block = min(triton.next_power_of_2(width), 2048)
    _sigmoid_mul[(count, triton.cdiv(width, block))](
        x, gate, out, width, ONE=gate.shape[1] == 1, BLOCK=block, **options(max(block // 512, 1))
    )

"""Gated delta nets: each row's tokens pass one by one through the states of its heads, which stay in registers.

A head's state [k_dim, v_dim] decays by a gate, or each of its rows by one, and is corrected by the delta rule: state +=
beta * k (v - state.T k). Its columns depend on nothing but themselves, the keys and the queries, so a program has a few
columns of one head. What does not depend on the token before is computed for all tokens at once, ahead of that: the
short convolution, and the length of keys and queries. Rows that only pad a step have no tokens, and touch no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.causal_conv import ROW_FIELDS, ConvSizes, StateRows, store_conv_state, window
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.silu_and_mul import silu
from penstock.model.ops import DeltaInputs, DeltaWeights
from penstock.model.recurrence import DeltaSpec

COLUMNS = 16  # of a state, in one program


class HeadSizes(NamedTuple):
    """Holds the constants of a delta net."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int  # width of the convolution
    padded_taps: int  # rounded up to a power of two
    fields: int = ROW_FIELDS


@triton.jit
def _short_conv(
    qkv,
    conv,
    states,
    rows,
    token_rows,
    mixed,
    stride,
    state_stride,
    scale,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes the short convolution of one head of q, of k or of v."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    K_HEADS: tl.constexpr = SIZES.k_heads
    K_DIM: tl.constexpr = SIZES.k_dim
    V_DIM: tl.constexpr = SIZES.v_dim
    TAPS: tl.constexpr = SIZES.taps
    WIDTH: tl.constexpr = 2 * K_HEADS * K_DIM + SIZES.v_heads * V_DIM
    token = tl.program_id(0).to(tl.int64)
    row_index = tl.load(token_rows + token)
    if row_index >= 0:
        row = rows + row_index * SIZES.fields
        first = tl.load(row).to(tl.int64)
        begin = tl.load(row + 3).to(tl.int64)
        head = tl.program_id(1)
        is_key = head < 2 * K_HEADS
        d = tl.arange(0, BLOCK)
        at = tl.where(is_key, head * K_DIM, 2 * K_HEADS * K_DIM + (head - 2 * K_HEADS) * V_DIM)
        inside = d < tl.where(is_key, K_DIM, V_DIM)
        channel = (at + d)[None, :]
        before = states + begin * state_stride + SIZES.v_heads * K_DIM * V_DIM
        tap = tl.arange(0, SIZES.padded_taps)[:, None]
        taps = tl.load(conv + channel * TAPS + tap, inside[None, :] & (tap < TAPS), 0.0)
        x, end = qkv + first * stride, token - first + 1
        seen = window(x, stride, before, WIDTH, begin >= 0, end, channel, inside[None, :], TAPS, SIZES.padded_taps)
        value = silu(tl.sum(seen * taps, 0))
        if is_key:
            value = value / tl.sqrt(tl.sum(value * value, 0) + 1e-6)
        if head < K_HEADS:
            value = value * scale
        tl.store(mixed + token * WIDTH + at + d, value, inside)


@triton.jit
def softplus(x):
    """Returns log(1 + e^x)."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _delta_rule(
    mixed,
    beta,
    alpha,
    log_decay,
    dt,
    states,
    rows,
    out,
    strides,
    SIZES: tl.constexpr,
    TILED: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    beta_stride, alpha_stride, state_stride = strides
    K_HEADS: tl.constexpr = SIZES.k_heads
    V_HEADS: tl.constexpr = SIZES.v_heads
    K_DIM: tl.constexpr = SIZES.k_dim
    V_DIM: tl.constexpr = SIZES.v_dim
    row = rows + tl.program_id(0) * SIZES.fields
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
        state = tl.load(states + begin * state_stride + place, inside & (begin >= 0), 0.0)
        rate = tl.load(log_decay + head)
        gate = head * K_DIM + tl.minimum(i, K_DIM - 1) if CHANNELS else head  # of each row of the state, or of all
        delay = tl.load(dt + gate)
        queries = mixed + first * WIDTH + key_head * K_DIM + i
        values = mixed + first * WIDTH + 2 * K_HEADS * K_DIM + head * V_DIM + column
        learned, decays = beta + first * beta_stride + head, alpha + first * alpha_stride + gate
        to = out + first * V_HEADS * V_DIM + head * V_DIM + column
        for token in range(count):
            q = tl.load(queries + token * WIDTH, i < K_DIM, 0.0)
            k = tl.load(queries + token * WIDTH + K_HEADS * K_DIM, i < K_DIM, 0.0)
            v = tl.load(values + token * WIDTH, column < V_DIM, 0.0)
            share = 1.0 / (1.0 + tl.exp(-tl.load(learned + token * beta_stride).to(tl.float32)))
            fading = tl.exp(rate * softplus(tl.load(decays + token * alpha_stride).to(tl.float32) + delay))
            state = state * (fading[:, None] if CHANNELS else fading)
            delta = share * (v - tl.sum(state * k[:, None], 0))
            state = state + k[:, None] * delta[None, :]
            tl.store(to + token * V_HEADS * V_DIM, tl.sum(state * q[:, None], 0), column < V_DIM)
            if (token + 1 == after) & (save >= 0):
                tl.store(states + save * state_stride + place, state, inside)
        tl.store(states + own * state_stride + place, state, inside)


@triton.jit
def _gated_norm(
    raw, z, gain, out, eps, stride, V_DIM: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Norms each head of what was read from states, and gates it by silu(z) or sigmoid(z)."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    v_width = tl.num_programs(1) * V_DIM
    d = tl.arange(0, BLOCK)
    column = tl.program_id(1) * V_DIM + d
    value = tl.load(raw + token * v_width + column, d < V_DIM, 0.0)
    gate = tl.load(z + token * stride + column, d < V_DIM, 0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-gate)) if SIGMOID else silu(gate)
    normed = value / tl.sqrt(tl.sum(value * value, 0) / V_DIM + eps) * tl.load(gain + d, d < V_DIM, 0.0)
    tl.store(out + token * v_width + column, (normed * gate).to(out.dtype.element_ty), d < V_DIM)


@triton.jit
def _sigmoid_mul(x, gate, out, width, ONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, inside, 0.0).to(tl.float32)
    by = tl.load(gate + row) if ONE else tl.load(gate + row * width + column, inside, 0.0)
    tl.store(out + row * width + column, (value / (1.0 + tl.exp(-by.to(tl.float32)))).to(out.dtype.element_ty), inside)


class DeltaScratch(NamedTuple):
    """Holds what the kernels of one step leave for each other, in float32."""

    mixed: Any  # [T, q + k + v] convolved
    raw: Any  # [T, v] read from states


def delta_net(
    x: DeltaInputs[Any],
    weights: DeltaWeights,
    spec: DeltaSpec,
    eps: float,
    states: Any,
    rows: StateRows,
    scratch: DeltaScratch,
    out: Any,
) -> None:
    """Computes a gated delta net: -> [T, v]; `states` is [states, state_floats] float32."""
    qkv, z = x.qkv, x.z[:, -spec.v_width :]
    gates = x.beta, x.alpha[:, -spec.decay_width :]
    padded_taps = triton.next_power_of_2(spec.conv_width)
    sizes = HeadSizes(spec.k_heads, spec.v_heads, spec.k_dim, spec.v_dim, spec.conv_width, padded_taps)
    options, stride = launch_options(1), states.stride(0)
    block = triton.next_power_of_2(max(spec.k_dim, spec.v_dim))
    _short_conv[(len(out), 2 * spec.k_heads + spec.v_heads)](
        *(qkv, weights.conv, states, rows.numbers, rows.of_tokens, scratch.mixed),
        *(qkv.stride(0), stride, spec.k_dim**-0.5),
        SIZES=sizes,
        BLOCK=block,
        **options,
    )
    columns = min(COLUMNS, triton.next_power_of_2(spec.v_dim))
    _delta_rule[(len(rows.numbers), spec.v_heads, triton.cdiv(spec.v_dim, columns))](
        *(scratch.mixed, *gates, weights.decay, weights.dt_bias, states, rows.numbers, scratch.raw),
        (*(gate.stride(0) for gate in gates), stride),
        SIZES=sizes,
        TILED=spec.tiled,
        CHANNELS=spec.channel_decay,
        KEYS=triton.next_power_of_2(spec.k_dim),
        COLUMNS=columns,
        **options,
    )
    conv = ConvSizes.of(spec.conv_width, spec.width, qkv.stride(0), spec.k_dim * spec.v_width)
    store_conv_state(qkv, conv, states, rows)
    block = triton.next_power_of_2(spec.v_dim)
    normed = scratch.raw, z, weights.gain, out, eps, z.stride(0)
    sigmoid = spec.gate == "sigmoid"
    _gated_norm[(len(out), spec.v_heads)](*normed, V_DIM=spec.v_dim, SIGMOID=sigmoid, BLOCK=block, **options)


def sigmoid_mul(x: Any, gate: Any, out: Any) -> None:
    """Computes x * sigmoid(gate): [T, width] with [T, width] or [T, 1]."""
    count, width = x.shape
    block = min(triton.next_power_of_2(width), 2048)
    options = launch_options(max(block // 512, 1))
    grid = (count, triton.cdiv(width, block))
    _sigmoid_mul[grid](x, gate, out, width, ONE=gate.shape[1] == 1, BLOCK=block, **options)

"""The gated delta rule token by token: each row's tokens pass through the states of its heads, which stay in registers.

A head's state [k_dim, v_dim] decays by a gate, or each of its rows by one, and is corrected by the delta rule: state +=
beta * k (v - state.T k). Its columns depend on nothing but themselves, the keys and the queries, so a program has a few
columns of one head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.causal_conv import ROW_FIELDS, StateRows
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.model.recurrence import DeltaSpec

COLUMNS = 16  # state columns per program


class HeadSizes(NamedTuple):
    """Holds the constants of a delta net."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int  # width of the convolution
    padded_taps: int  # rounded up to a power of two
    tiled: bool  # value head h has key head h % k_heads; else neighbours share one
    channels: bool  # each row of a state decays by a gate of its own; else all by one
    fields: int = ROW_FIELDS

    @classmethod
    def of(cls, spec: DeltaSpec) -> HeadSizes:
        heads, padded_taps = (spec.k_heads, spec.v_heads), triton.next_power_of_2(spec.conv_width)
        return cls(*heads, spec.k_dim, spec.v_dim, spec.conv_width, padded_taps, spec.tiled, spec.channel_decay)


class Gates(NamedTuple):
    """Holds the gates of states: the share of each token, and the decay."""

    beta: Any  # [T, v_heads or more]
    alpha: Any  # [T, v_heads], or [T, v_heads * k_dim] with channels
    decay: Any  # [v_heads]
    dt_bias: Any  # as wide as alpha

    @property
    def strides(self) -> tuple[int, int]:
        return self.beta.stride(0), self.alpha.stride(0)


@triton.jit
def key_head_of(head, SIZES: tl.constexpr):
    return head % SIZES.k_heads if SIZES.tiled else head // (SIZES.v_heads // SIZES.k_heads)


@triton.jit
def softplus(x):
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
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEAVE_CHUNKS: tl.constexpr,
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
    if LEAVE_CHUNKS:
        count = tl.where(tl.load(row + 7) > 0, 0, count)
    if count > 0:
        first = tl.load(row).to(tl.int64)
        own, begin = tl.load(row + 2).to(tl.int64), tl.load(row + 3).to(tl.int64)
        save, after = tl.load(row + 4).to(tl.int64), tl.load(row + 5)
        WIDTH: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
        head = tl.program_id(1)
        key_head = key_head_of(head, SIZES)
        i = tl.arange(0, KEYS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (i < K_DIM)[:, None] & (column < V_DIM)[None, :]
        place = head * K_DIM * V_DIM + i[:, None] * V_DIM + column[None, :]
        state = tl.load(states + begin * state_stride + place, inside & (begin >= 0), 0.0)
        rate = tl.load(log_decay + head)
        gate = head * K_DIM + tl.minimum(i, K_DIM - 1) if SIZES.channels else head  # per channel or head
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
            state = state * (fading[:, None] if SIZES.channels else fading)
            delta = share * (v - tl.sum(state * k[:, None], 0))
            state = state + k[:, None] * delta[None, :]
            tl.store(to + token * V_HEADS * V_DIM, tl.sum(state * q[:, None], 0), column < V_DIM)
            if (token + 1 == after) & (save >= 0):
                tl.store(states + save * state_stride + place, state, inside)
        tl.store(states + own * state_stride + place, state, inside)


def delta_rule(
    mixed: Any,
    gates: Gates,
    sizes: HeadSizes,
    states: Any,
    rows: StateRows,
    out: Any,
    *,
    leave_chunks: bool,
    fixed: bool = False,
) -> None:
    """Takes states through the tokens of rows; with `leave_chunks`, only of rows that are not divided into chunks.
    `fixed`: products and sums are not contracted, which the compiler might do in only some turns of its loop."""
    columns = min(COLUMNS, triton.next_power_of_2(sizes.v_dim))
    _delta_rule[(len(rows.numbers), sizes.v_heads, triton.cdiv(sizes.v_dim, columns))](
        *(mixed, *gates, states, rows.numbers, out),
        (*gates.strides, states.stride(0)),
        SIZES=sizes,
        KEYS=triton.next_power_of_2(sizes.k_dim),
        COLUMNS=columns,
        LEAVE_CHUNKS=leave_chunks,
        enable_fp_fusion=not fixed,
        **launch_options(1),
    )

"""Mamba's selective scan: each row's tokens pass one by one through the states of its channels, which stay in
registers.

A channel's state has a few numbers and depends on no other channel, so a program has some channels of one row. Rows
that only pad a step have no tokens, and touch no state.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.causal_conv import ROW_FIELDS, StateRows
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.silu_and_mul import silu
from penstock.model.ops import ScanWeights
from penstock.model.recurrence import ScanSpec

NUMBERS = 512  # state values per program


@triton.jit
def _channel_scan(
    x,
    dt,
    b,
    c,
    gate,
    decay,
    skip,
    states,
    rows,
    out,
    state_stride,
    gate_stride,
    width,
    STATE: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = rows + tl.program_id(0) * FIELDS
    count = tl.load(row + 1)
    if count > 0:
        first = tl.load(row).to(tl.int64)
        own = tl.load(row + 2).to(tl.int64)
        begin = tl.load(row + 3).to(tl.int64)
        save = tl.load(row + 4).to(tl.int64)
        after = tl.load(row + 5)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        i = tl.arange(0, PADDED)
        here = channel < width
        inside = here[:, None] & (i < STATE)[None, :]
        place = channel[:, None] * STATE + i[None, :]
        state = tl.load(states + begin * state_stride + place, inside & (begin >= 0), 0.0)
        rates = tl.load(decay + place, inside, 0.0)
        past = tl.load(skip + channel, here, 0.0)
        for index in range(count):
            token = first + index
            value = tl.load(x + token * width + channel, here, 0.0).to(tl.float32)
            z = tl.load(gate + token * gate_stride + channel, here, 0.0).to(tl.float32)
            delay = tl.load(dt + token * width + channel, here, 0.0).to(tl.float32)
            step = tl.where(delay > 20.0, delay, tl.log(1.0 + tl.exp(tl.minimum(delay, 20.0))))
            inputs = tl.load(b + token * STATE + i, i < STATE, 0.0).to(tl.float32)
            reads = tl.load(c + token * STATE + i, i < STATE, 0.0).to(tl.float32)
            state = state * tl.exp(rates * step[:, None]) + (step * value)[:, None] * inputs[None, :]
            read = tl.sum(state * reads[None, :], 1) + past * value
            tl.store(out + token * width + channel, (read * silu(z)).to(out.dtype.element_ty), here)
            if (index + 1 == after) & (save >= 0):
                tl.store(states + save * state_stride + place, state, inside)
        tl.store(states + own * state_stride + place, state, inside)


def selective_scan(
    x: Any,
    dt: Any,
    b: Any,
    c: Any,
    gate: Any,
    weights: ScanWeights,
    spec: ScanSpec,
    states: Any,
    rows: StateRows,
    out: Any,
    *,
    fixed: bool = False,
) -> None:
    """Computes Mamba's selective scan of x, [T, width], gated by the last `width` columns of `gate`; `states` is
    [states, state_floats] float32. `fixed`: see delta_rule.py."""
    padded = triton.next_power_of_2(spec.state_size)
    channels = min(max(NUMBERS // padded, 1), triton.next_power_of_2(spec.width))
    _channel_scan[(len(rows.numbers), triton.cdiv(spec.width, channels))](
        *(x, dt, b, c, gate[:, -spec.width :], weights.decay, weights.skip, states, rows.numbers, out),
        *(states.stride(0), gate.stride(0), spec.width),
        STATE=spec.state_size,
        PADDED=padded,
        CHANNELS=channels,
        FIELDS=ROW_FIELDS,
        enable_fp_fusion=not fixed,
        **launch_options(1),
    )

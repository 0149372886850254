"""Computes gated delta nets: a short convolution, the delta rule, and a gated norm of its output.

The convolution and the lengths of keys and queries do not depend on the token before, so they are computed for all
tokens at once. Rows of a few tokens then pass through their states token by token (delta_rule.py), longer ones in
chunks (delta_chunk.py). Rows that only pad a step have no tokens and touch no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.causal_conv import ConvSizes, StateRows, store_conv_state, window
from penstock.backend.cuda.kernels.delta_chunk import delta_chunks
from penstock.backend.cuda.kernels.delta_rule import Gates, HeadSizes, delta_rule
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.silu_and_mul import silu
from penstock.model.ops import DeltaInputs, DeltaWeights
from penstock.model.recurrence import DeltaSpec


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
def _gated_norm(
    raw, z, gain, out, eps, stride, V_DIM: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Applies the norm to each head of the delta rule's output, and the gate silu(z) or sigmoid(z)."""
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
    """Holds intermediate results of one step's kernels, in float32."""

    mixed: Any  # [T, q + k + v] convolved
    raw: Any  # [T, v] read from states
    inverses: Any  # [T, v_heads * CHUNK] see delta_chunk.py; nothing where no chunks are computed
    scores: Any  # the same


def delta_net(
    x: DeltaInputs[Any],
    weights: DeltaWeights,
    spec: DeltaSpec,
    eps: float,
    states: Any,
    rows: StateRows,
    scratch: DeltaScratch,
    out: Any,
    prompts: bool = True,
    fixed: bool = False,
) -> None:
    """Computes a gated delta net: -> [T, v]; `states` is [states, state_floats] float32. `prompts`: rows may have many
    tokens, which are computed in chunks. `fixed`: see delta_rule.py."""
    qkv, z = x.qkv, x.z[:, -spec.v_width :]
    sizes, options, stride = HeadSizes.of(spec), launch_options(1), states.stride(0)
    _short_conv[(len(out), 2 * spec.k_heads + spec.v_heads)](
        *(qkv, weights.conv, states, rows.numbers, rows.of_tokens, scratch.mixed),
        *(qkv.stride(0), stride, spec.k_dim**-0.5),
        SIZES=sizes,
        BLOCK=triton.next_power_of_2(max(spec.k_dim, spec.v_dim)),
        **options,
    )
    gates = Gates(x.beta, x.alpha[:, -spec.decay_width :], weights.decay, weights.dt_bias)
    chunked = prompts and spec.chunked and len(rows.chunks) > 0
    delta_rule(scratch.mixed, gates, sizes, states, rows, scratch.raw, leave_chunks=chunked, fixed=fixed)
    if chunked:
        delta_chunks(scratch.mixed, gates, sizes, states, rows, scratch.inverses, scratch.scores, scratch.raw)
    conv = ConvSizes.of(spec.conv_width, spec.width, qkv.stride(0), spec.k_dim * spec.v_width)
    store_conv_state(qkv, conv, states, rows)
    block = triton.next_power_of_2(spec.v_dim)
    sigmoid = spec.gate == "sigmoid"
    _gated_norm[(len(out), spec.v_heads)](
        scratch.raw, z, weights.gain, out, eps, z.stride(0), V_DIM=spec.v_dim, SIGMOID=sigmoid, BLOCK=block, **options
    )


def sigmoid_mul(x: Any, gate: Any, out: Any) -> None:
    """Computes x * sigmoid(gate): [T, width] with [T, width] or [T, 1]."""
    count, width = x.shape
    block = min(triton.next_power_of_2(width), 2048)
    options = launch_options(max(block // 512, 1))
    grid = (count, triton.cdiv(width, block))
    _sigmoid_mul[grid](x, gate, out, width, ONE=gate.shape[1] == 1, BLOCK=block, **options)

"""Norms of queries, keys and values: RMS norms in runs as long as their gains (each head, or all of them), or layer
norms of each head.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous


@triton.jit
def norm_part(
    x, gain, out, first, eps, WIDTH: tl.constexpr, RUN: tl.constexpr, LAYER: tl.constexpr, GAINED: tl.constexpr
):
    """Norms WIDTH values from `first` on, RUN at a time; unless GAINED, without a gain. Layer norms have a gain for
    each of all values."""
    RUNS: tl.constexpr = WIDTH // RUN
    run = tl.arange(0, triton.next_power_of_2(RUNS))[:, None]
    d = tl.arange(0, triton.next_power_of_2(RUN))[None, :]
    inside = (run < RUNS) & (d < RUN)
    place = first + run * RUN + d
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    if LAYER:
        value = tl.where(inside, value - (tl.sum(value, 1) / RUN)[:, None], 0.0)
    mean_square = tl.sum(value * value, 1) / RUN
    normed = value * (1.0 / tl.sqrt(mean_square + eps))[:, None]
    if LAYER:
        normed *= tl.load(gain + run * RUN + d, inside, 0.0)
    elif GAINED:
        normed *= tl.load(gain + d, d < RUN, 0.0)
    tl.store(out + place, normed.to(out.dtype.element_ty), inside)


@triton.jit
def _norm_qk(
    x,
    q_gain,
    k_gain,
    out,
    eps,
    Q: tl.constexpr,
    KV: tl.constexpr,
    Q_RUN: tl.constexpr,
    K_RUN: tl.constexpr,
    V_RUN: tl.constexpr,
    LAYER: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * (Q + 2 * KV)
    part = tl.program_id(1)
    if part == 0:
        norm_part(x, q_gain, out, row, eps, Q, Q_RUN, LAYER, True)
    elif part == 1:
        norm_part(x, k_gain, out, row + Q, eps, KV, K_RUN, LAYER, True)
    elif V_RUN > 0:
        norm_part(x, k_gain, out, row + Q + KV, eps, KV, V_RUN, False, False)
    else:
        column = tl.arange(0, triton.next_power_of_2(KV))
        value = tl.load(x + row + Q + KV + column, column < KV, 0.0)
        tl.store(out + row + Q + KV + column, value, column < KV)


def norm_qk(
    x: Any,
    q_gain: Any,
    k_gain: Any,
    q_width: int,
    kv_width: int,
    eps: float,
    out: Any,
    layer_dim: int = 0,
    v_run: int = 0,
) -> None:
    """Norms q and k in rows [T, q + k + v]; v is normed in runs of `v_run` without a gain, or stays as it is. With a
    `layer_dim`, the norms are layer norms of that many values at a time."""
    _norm_qk[(len(x), 3)](
        x,
        q_gain,
        k_gain,
        out,
        eps,
        Q=q_width,
        KV=kv_width,
        Q_RUN=layer_dim or len(q_gain),
        K_RUN=layer_dim or len(k_gain),
        V_RUN=v_run,
        LAYER=layer_dim > 0,
        **launch_options(min(max(triton.next_power_of_2(q_width) // 512, 1), 8)),
    )


@triton.jit
def _norm_runs(x, gain, out, eps, RUN: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    run = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    norm_part(x, gain, out, run * RUN, eps, RUN, RUN, False, True)


def norm_runs(x: Any, gain: Any, eps: float, out: Any) -> None:
    """Norms runs of rows [T, n * run] that are as long as the gain."""
    run = len(gain)
    options = launch_options(min(max(triton.next_power_of_2(run) // 256, 1), 8))
    _norm_runs[(len(x), x.shape[1] // run)](x, gain, out, eps, RUN=run, **options)

"""Ops on parts of rows: gates by columns of other rows, gates that are cut off, and residual streams (AltUp).

A row of n streams has them side by side. A program computes some columns of all streams of a row, or one stream.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.silu_and_mul import gelu, gelu_tanh, silu

LEAST_SQUARE = 1e-5  # mean square of a scaled stream, at least


@triton.jit
def activated(x, ACT: tl.constexpr):
    if ACT == "gelu":
        return gelu(x)
    elif ACT == "gelu_tanh":
        return gelu_tanh(x)
    else:
        return silu(x)


@triton.jit
def _sparse_act_and_mul(x, out, hidden, cutoff, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    wait_for_previous(PDL)
    left = tl.load(x + row * 2 * hidden + column, inside, 0.0).to(tl.float32)
    centered = tl.where(inside, left - tl.sum(left) / hidden, 0.0)
    deviation = tl.sqrt(tl.sum(centered * centered) / hidden)
    kept = tl.maximum(centered - cutoff * deviation, 0.0)
    right = tl.load(x + row * 2 * hidden + hidden + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * hidden + column, (activated(kept, ACT) * right).to(out.dtype.element_ty), inside)


def sparse_act_and_mul(x: Any, out: Any, act: str, cutoff: float) -> None:
    """Computes act(max(left - c, 0)) * right for a c above the mean of left, in deviations: [T, 2 * hidden] ->
    [T, hidden]."""
    rows, hidden = out.shape
    block = triton.next_power_of_2(hidden)
    options = launch_options(min(max(block // 512, 4), 16))
    _sparse_act_and_mul[(rows,)](x, out, hidden, cutoff, ACT=act, BLOCK=block, **options)


@triton.jit
def _gate_columns(x, y, out, width, y_width, first, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_previous(PDL)
    gate = activated(tl.load(x + row * width + column, inside, 0.0).to(tl.float32), ACT)
    value = tl.load(y + row * y_width + first + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * value).to(out.dtype.element_ty), inside)


def gate_columns(x: Any, y: Any, out: Any, first: int, act: str) -> None:
    """Computes act(x) * the columns of y from `first` on: [T, n], [T, m] -> [T, n]."""
    rows, width = x.shape
    block = min(triton.next_power_of_2(width), 1024)
    grid = (rows, triton.cdiv(width, block))
    _gate_columns[grid](x, y, out, width, y.shape[1], first, ACT=act, BLOCK=block, **launch_options())


@triton.jit
def _match_rms(x, like, out, width, least, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    stream = row * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wait_for_previous(PDL)
    value = tl.load(x + stream * width + column, inside, 0.0).to(tl.float32)
    wanted = tl.load(like + row * width + column, inside, 0.0).to(tl.float32)
    found = tl.maximum(tl.sum(value * value) / width, least)
    scaled = value * tl.sqrt(tl.sum(wanted * wanted) / width / found)
    tl.store(out + stream * width + column, scaled.to(out.dtype.element_ty), inside)


def match_rms(x: Any, like: Any, out: Any) -> None:
    """Scales runs of x to the root mean square of `like`: [T, n * dim], [T, dim] -> [T, n * dim]."""
    rows, width = like.shape
    block = triton.next_power_of_2(width)
    options = launch_options(min(max(block // 512, 1), 16))
    _match_rms[(rows, x.shape[1] // width)](x, like, out, width, LEAST_SQUARE, BLOCK=block, **options)


@triton.jit
def _mix_streams(x, coefficients, out, width, STREAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_previous(PDL)
    for j in tl.static_range(STREAMS):
        total = tl.load(x + (row * STREAMS + j) * width + column, inside, 0.0).to(tl.float32)
        for i in tl.static_range(STREAMS):
            factor = tl.load(coefficients + (row * STREAMS + j) * STREAMS + i).to(tl.float32)
            total += factor * tl.load(x + (row * STREAMS + i) * width + column, inside, 0.0).to(tl.float32)
        tl.store(out + (row * STREAMS + j) * width + column, total.to(out.dtype.element_ty), inside)


def mix_streams(x: Any, coefficients: Any, out: Any) -> None:
    """Adds a mix of all streams to each one: [T, n * dim], [T, n * n] -> [T, n * dim]."""
    streams = isqrt(coefficients.shape[1])
    width = x.shape[1] // streams
    block = min(triton.next_power_of_2(width), 512)
    grid = (len(x), triton.cdiv(width, block))
    _mix_streams[grid](x, coefficients, out, width, STREAMS=streams, BLOCK=block, **launch_options())


@triton.jit
def _correct_streams(
    x, new, coefficients, out, width, active, STREAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_previous(PDL)
    error = tl.load(new + row * width + column, inside, 0.0).to(tl.float32)
    error -= tl.load(x + (row * STREAMS + active) * width + column, inside, 0.0).to(tl.float32)
    for j in tl.static_range(STREAMS):
        factor = 1.0 + tl.load(coefficients + row * STREAMS + j).to(tl.float32)
        place = (row * STREAMS + j) * width + column
        moved = tl.load(x + place, inside, 0.0).to(tl.float32) + factor * error
        tl.store(out + place, moved.to(out.dtype.element_ty), inside)


def correct_streams(x: Any, new: Any, coefficients: Any, out: Any, active: int) -> None:
    """Moves all streams by the error of one: [T, n * dim], [T, dim], [T, n] -> [T, n * dim]."""
    rows, width = new.shape
    block = min(triton.next_power_of_2(width), 512)
    grid, streams = (rows, triton.cdiv(width, block)), coefficients.shape[1]
    _correct_streams[grid](x, new, coefficients, out, width, active, STREAMS=streams, BLOCK=block, **launch_options())


@triton.jit
def _add_to_streams(x, y, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_previous(PDL)
    place = (row * tl.num_programs(1) + stream) * width + column
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    value += tl.load(y + row * width + column, inside & (stream > 0), 0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), inside)


def add_to_streams(x: Any, y: Any, out: Any) -> None:
    """Adds y to all streams but the first: [T, n * dim], [T, dim] -> [T, n * dim]."""
    rows, width = y.shape
    block = min(triton.next_power_of_2(width), 1024)
    grid = (rows, x.shape[1] // width, triton.cdiv(width, block))
    _add_to_streams[grid](x, y, out, width, BLOCK=block, **launch_options())

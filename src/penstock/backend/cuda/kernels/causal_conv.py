"""Causal convolutions over time: each channel sees the last inputs of its own sequence; the row's state has those
from earlier steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.silu_and_mul import silu

# first token, tokens, own state, state to begin with or -1, state to save to or -1, after how many tokens, first chunk,
# chunks
ROW_FIELDS = 8
CHUNK_FIELDS = 2  # first token, tokens
CHANNELS = 256  # per program


class StateRows(NamedTuple):
    """Holds the rows of a step, which of them each token belongs to, and the chunks that long rows are divided into."""

    numbers: Any  # [R, ROW_FIELDS]
    of_tokens: Any  # [T] the row of each token, -1 for one that only pads
    chunks: Any  # [C, CHUNK_FIELDS] row by row; padding has 0 tokens


class ConvSizes(NamedTuple):
    """Holds the constants of a convolution."""

    taps: int  # positions that it sees, its own included
    padded_taps: int  # rounded up to a power of two
    width: int  # channels
    stride: int  # from one row of inputs to the next
    column: int  # where the channels begin in a row of inputs
    offset: int  # floats of a state before the last inputs of the convolution
    gated: bool = False  # inputs are [b, c, u]: it sees b * u, and is multiplied by c
    fields: int = ROW_FIELDS

    @classmethod
    def of(
        cls, conv_width: int, width: int, stride: int, offset: int, column: int = 0, gated: bool = False
    ) -> ConvSizes:
        return cls(conv_width, triton.next_power_of_2(conv_width), width, stride, column, offset, gated)


@triton.jit
def window(
    x,
    stride,
    before,
    width,
    exists,
    end,
    channel,
    inside,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,
    GATED: tl.constexpr = False,
):
    """Returns the inputs of the convolution that ends before token `end` of a row; those before the row are of its
    state."""
    tap = tl.arange(0, PADDED)[:, None]
    index = end - TAPS + tap
    known = inside & (tap < TAPS)
    mine = tl.load(x + index * stride + channel, known & (index >= 0), 0.0).to(tl.float32)
    if GATED:
        mine *= tl.load(x + index * stride + 2 * width + channel, known & (index >= 0), 0.0).to(tl.float32)
    return mine + tl.load(before + (index + TAPS - 1) * width + channel, known & (index < 0) & exists, 0.0)


@triton.jit
def _causal_conv(
    x,
    taps,
    bias,
    states,
    rows,
    token_rows,
    out,
    state_stride,
    SIZES: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    TAPS: tl.constexpr = SIZES.taps
    PADDED: tl.constexpr = SIZES.padded_taps
    token = tl.program_id(0).to(tl.int64)
    row_index = tl.load(token_rows + token)
    if row_index >= 0:
        row = rows + row_index * SIZES.fields
        first = tl.load(row).to(tl.int64)
        begin = tl.load(row + 3).to(tl.int64)
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        channel, inside = d[None, :], (d < SIZES.width)[None, :]
        before = states + begin * state_stride + SIZES.offset
        tap = tl.arange(0, PADDED)[:, None]
        factors = tl.load(taps + channel * TAPS + tap, inside & (tap < TAPS), 0.0)
        source, end = x + first * SIZES.stride + SIZES.column, token - first + 1
        WIDTH: tl.constexpr = SIZES.width
        GATED: tl.constexpr = SIZES.gated
        seen = window(source, SIZES.stride, before, WIDTH, begin >= 0, end, channel, inside, TAPS, PADDED, GATED)
        value = tl.sum(seen * factors, 0)
        if BIAS:
            value += tl.load(bias + d, d < SIZES.width, 0.0)
        if SIZES.gated:
            value *= tl.load(x + token * SIZES.stride + SIZES.width + d, d < SIZES.width, 0.0).to(tl.float32)
        tl.store(out + token * SIZES.width + d, silu(value) if SILU else value, d < SIZES.width)


@triton.jit
def _store_conv_state(x, states, rows, state_stride, SIZES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    TAPS: tl.constexpr = SIZES.taps
    PADDED: tl.constexpr = SIZES.padded_taps
    WIDTH: tl.constexpr = SIZES.width
    row = rows + tl.program_id(0) * SIZES.fields
    count = tl.load(row + 1)
    if count > 0:
        source = x + tl.load(row).to(tl.int64) * SIZES.stride + SIZES.column
        own = tl.load(row + 2).to(tl.int64)
        begin = tl.load(row + 3).to(tl.int64)
        save = tl.load(row + 4).to(tl.int64)
        channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        tap = tl.arange(0, PADDED)[:, None]
        inside = (channel < WIDTH) & (tap > 0) & (tap < TAPS)
        before = states + begin * state_stride + SIZES.offset
        after = tl.load(row + 5)
        GATED: tl.constexpr = SIZES.gated
        saved = window(source, SIZES.stride, before, WIDTH, begin >= 0, after, channel, inside, TAPS, PADDED, GATED)
        last = window(source, SIZES.stride, before, WIDTH, begin >= 0, count, channel, inside, TAPS, PADDED, GATED)
        tl.debug_barrier()  # a state that begins with itself is read whole before it is written
        place = SIZES.offset + (tap - 1) * WIDTH + channel
        tl.store(states + save * state_stride + place, saved, inside & (save >= 0))
        tl.store(states + own * state_stride + place, last, inside)


def causal_conv(
    x: Any, taps: Any, bias: Any | None, sizes: ConvSizes, states: Any, rows: StateRows, out: Any, silu: bool = True
) -> None:
    """Computes the convolution of some columns of x, and silu of it: [T, stride] -> [T, width] float32. `taps` is
    [width, conv_width], the factor of the token itself last."""
    block = min(triton.next_power_of_2(sizes.width), CHANNELS)
    _causal_conv[(len(out), triton.cdiv(sizes.width, block))](
        *(x, taps, taps if bias is None else bias, states, rows.numbers, rows.of_tokens, out, states.stride(0)),
        SIZES=sizes,
        BIAS=bias is not None,
        SILU=silu,
        BLOCK=block,
        **launch_options(1),
    )


def store_conv_state(x: Any, sizes: ConvSizes, states: Any, rows: StateRows) -> None:
    """Stores the last inputs of each row's convolution. What begins with the states of before must be computed."""
    if sizes.taps > 1:
        grid = (len(rows.numbers), triton.cdiv(sizes.width, CHANNELS))
        _store_conv_state[grid](
            x, states, rows.numbers, states.stride(0), SIZES=sizes, BLOCK=CHANNELS, **launch_options(1)
        )

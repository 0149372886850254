"""Products with EXL3 weights (model/formats/trellis.py), whose numbers are decoded where they are multiplied.

Few rows are rotated, multiplied with the numbers, and rotated back: y = svh * (H @ (numbers @ (H @ (suh * x)))). For
many rows the whole weight is written out once. Numbers are exact in float16. Rows are rotated in float32 by a fast
Walsh-Hadamard transform, which a warp does without shared memory between its turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.interpreter import dot
from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.split_k import SplitKScratch, sum_splits
from penstock.model.formats.trellis import FACTORS, MUL1, PLAIN

LARGEST = tl.constexpr(65504.0)  # float16's
ROOT = tl.constexpr(0.08838834764831845)  # 1 / sqrt(128)
RUNS = 4  # 128 values each; a program has one warp


class CodeBook(NamedTuple):
    """Says how a state becomes a number."""

    bits: int
    factor: int
    added: int
    bytes: bool  # adds up bytes of the product, not halves


@dataclass(frozen=True, slots=True)
class TrellisWeight:
    """Holds one EXL3 weight."""

    code_book: CodeBook
    words: Any  # [width / 16, rows / 16, 8 * bits] int32
    svh: Any  # [rows] float32
    suh: Any  # [width] float32

    @property
    def rows(self) -> int:
        return int(self.svh.shape[0])

    @property
    def width(self) -> int:
        return int(self.suh.shape[0])


class Tiling(NamedTuple):
    """Says how a product is tiled."""

    items: int  # rows of x in one program
    rows: int  # rows of the weight per program: 16 to 128
    split: int  # programs that share the columns of a tile
    warps: int


def code_book_of(kind: str, bits: int) -> CodeBook:
    return CodeBook(bits, FACTORS[kind], 64248484 if kind == PLAIN else 0, kind == MUL1)


@triton.jit
def half_of(bits):
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def numbers_of(states, BOOK: tl.constexpr):
    product = states * BOOK.factor + BOOK.added
    if BOOK.bytes:
        pairs = (product & 0xFF00FF) + ((product >> 8) & 0xFF00FF)
        total = ((pairs & 0xFFFF) + (pairs >> 16)).to(tl.int32).to(tl.float32)
        return ((total + 1024.0) * 0.006767272949218750 - 10.3828125).to(tl.float16)
    else:
        halves = (product & 0x8FFF8FFF) ^ 0x3B603B60
        return half_of(halves) + half_of(halves >> 16)


@triton.jit
def load_numbers(words, first, row, rows, K: tl.constexpr, N: tl.constexpr, BOOK: tl.constexpr):
    """Returns the numbers of columns `first` to `first` + K, for N rows of the weight from `row` on: [K, N].

    Columns 2 * n and 2 * n + 1 are neighbours in a tile's ring: a window of 64 bits has the states of both.
    """
    BITS: tl.constexpr = BOOK.bits
    pair = tl.arange(0, K // 2)[:, None]
    line = row + tl.arange(0, N)[None, :]
    number = ((line % 8) * 4 + pair % 4) * 8 + (line // 8 % 2) * 4 + (pair // 4 % 2) * 2
    end = (number + 2) * BITS
    last = (end - 1) // 32
    tile = (first // 16 + pair // 8).to(tl.int64) * (rows // 16) + line // 16
    ring = words + tile * (8 * BITS)
    before = tl.load(ring + (last + 8 * BITS - 1) % (8 * BITS)).to(tl.uint32, bitcast=True)
    here = tl.load(ring + last).to(tl.uint32, bitcast=True)
    window = ((before.to(tl.uint64) << 32) | here.to(tl.uint64)) >> (32 * (last + 1) - end).to(tl.uint64)
    window = window.to(tl.uint32)
    numbers = tl.join(numbers_of((window >> BITS) & 0xFFFF, BOOK), numbers_of(window & 0xFFFF, BOOK))
    return tl.reshape(tl.permute(numbers, [0, 2, 1]), [K, N])


@triton.jit
def hadamard():
    common = tl.arange(0, 128)[:, None] & tl.arange(0, 128)[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return 1.0 - 2.0 * (common & 1).to(tl.float32)


@triton.jit
def rotated(values, RUNS: tl.constexpr):
    """Returns values [RUNS, 128] times the normalized Hadamard matrix, in float32. Each of seven turns adds and
    subtracts neighbours and moves the lowest bit of a column's number to the top, so that columns end where they
    began."""
    for _ in tl.static_range(7):
        even, odd = tl.split(tl.reshape(values, [RUNS, 64, 2]))
        values = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 2, 1]), [RUNS, 128])
    return values * ROOT


@triton.jit
def runs_of(count, width, RUNS: tl.constexpr):
    """Returns which runs of 128 values this program rotates: the item, the columns, and whether there is such an item.
    Runs of one row and of several are rotated together."""
    run = tl.program_id(0) * RUNS + tl.arange(0, RUNS)[:, None]
    item = run // (width // 128)
    return item, run % (width // 128) * 128 + tl.arange(0, 128)[None, :], item < count


@triton.jit
def _rotate_inputs(x, suh, out, count, width, stride, RUNS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    item, column, inside = runs_of(count, width, RUNS)
    factors = tl.load(suh + column)
    wait_for_previous(PDL)
    values = tl.load(x + item.to(tl.int64) * stride + column, inside, 0.0).to(tl.float32)
    made = rotated(values * factors, RUNS)
    made = tl.minimum(tl.maximum(made, -LARGEST), LARGEST).to(tl.float16)
    tl.store(out + item.to(tl.int64) * width + column, made, inside)


@triton.jit
def _trellis_gemm(
    x, words, partials, count, rows, width, BOOK: tl.constexpr, TILING: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    ITEMS: tl.constexpr = TILING.items
    N: tl.constexpr = TILING.rows
    row = tl.program_id(0) * N
    item = tl.program_id(1) * ITEMS + tl.arange(0, ITEMS)[:, None]
    share = tl.cdiv(tl.cdiv(width, K), TILING.split) * K
    first = tl.program_id(2) * share
    total = tl.zeros([ITEMS, N], tl.float32)
    wait_for_previous(PDL)
    for column in range(first, tl.minimum(first + share, width), K):
        numbers = load_numbers(words, column, row, rows, K, N, BOOK)
        at = x + item.to(tl.int64) * width + column + tl.arange(0, K)[None, :]
        total += dot(tl.load(at, item < count, 0.0), numbers)
    line = row + tl.arange(0, N)[None, :]
    place = (tl.program_id(2) * count + item) * rows + line
    tl.store(partials + place, total, item < count)


@triton.jit
def _rotate_outputs(
    partials, svh, bias, out, count, rows, stride, RUNS: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    item, line, inside = runs_of(count, rows, RUNS)
    factors = tl.load(svh + line)
    wait_for_previous(PDL)
    total = sum_splits(partials, item * rows + line, count * rows, inside, SPLIT)
    made = rotated(total, RUNS) * factors
    if BIAS:
        made += tl.load(bias + line)
    tl.store(out + item.to(tl.int64) * stride + line, made.to(out.dtype.element_ty), inside)


@triton.jit
def _dequantize_trellis(words, suh, svh, out, rows, width, BOOK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0) * 128
    column = tl.program_id(1) * 128
    signs = hadamard().to(tl.float16)
    numbers = load_numbers(words, column, row, rows, 128, 128, BOOK)
    half = (dot(signs, numbers) * ROOT).to(tl.float16)
    values = tl.trans(dot(half, signs) * ROOT)
    line = row + tl.arange(0, 128)[:, None]
    place = column + tl.arange(0, 128)[None, :]
    values = values * tl.load(svh + line) * tl.load(suh + place)
    wait_for_previous(PDL)
    tl.store(out + line.to(tl.int64) * width + place, values.to(out.dtype.element_ty))


def rotate_inputs(x: Any, weight: TrellisWeight, out: Any) -> None:
    """Sets out [T, width], of float16, to the rotated rows of x."""
    count, width = x.shape
    grid = (triton.cdiv(count * width // 128, RUNS),)
    _rotate_inputs[grid](x, weight.suh, out, count, width, x.stride(0), RUNS=RUNS, **launch_options(1))


def trellis_gemm(
    x: Any, weight: TrellisWeight, bias: Any | None, out: Any, tiling: Tiling, scratch: SplitKScratch
) -> None:
    """Computes out [T, rows] = x @ weight.T (+ bias) of rotated x."""
    count, rows, partials = len(x), weight.rows, scratch.partials
    grid = (triton.cdiv(rows, tiling.rows), triton.cdiv(count, tiling.items), tiling.split)
    options = launch_options(tiling.warps)
    _trellis_gemm[grid](
        x, weight.words, partials, count, rows, weight.width, BOOK=weight.code_book, TILING=tiling, K=64, **options
    )
    vector, options = weight.svh if bias is None else bias, launch_options(1)
    _rotate_outputs[(triton.cdiv(count * rows // 128, RUNS),)](
        partials, weight.svh, vector, out, count, rows, out.stride(0), RUNS=RUNS, SPLIT=tiling.split,
        BIAS=bias is not None, **options,
    )  # fmt: skip


def dequantize_trellis(weight: TrellisWeight, out: Any) -> None:
    _dequantize_trellis[weight.rows // 128, weight.width // 128](
        weight.words, weight.suh, weight.svh, out, weight.rows, weight.width, BOOK=weight.code_book, **launch_options(8)
    )

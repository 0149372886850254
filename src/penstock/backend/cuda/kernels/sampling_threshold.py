"""The sampling threshold: the smallest weight that top_k, top_p and min_p leave, without a sort.

Weights are not negative, so they order as their bits do. Counts by leading bits give a level above which only a few
thousand candidates lie; halving the range of bits thirty times, by counts or masses, finds the threshold among those.
If the candidates do not decide it, the same is done over all weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.sample_tokens import CHUNK, load_chunk, mass_of, row_maximum, weigh

BLOCK = 8192
CANDIDATES = 2048  # weights among which the threshold is looked for first
SHIFT = 21
LEVELS = 512  # the bits of 1, the largest weight, without the last 21, and some


class ThresholdScratch(NamedTuple):
    """Holds intermediate results of the passes."""

    weights: Any  # [S, vocab] float32
    counts: Any  # [S, chunks, LEVELS] int32
    masses: Any  # [S, chunks] int64
    levels: Any  # [S, 2] int32: the lowest bits of the candidates, and how many there are
    candidates: Any  # [S, CANDIDATES] float32

    @classmethod
    def on(cls, device: torch.device, rows: int, vocab: int) -> ThresholdScratch:
        chunks = triton.cdiv(vocab, CHUNK)
        sizes = ((rows, vocab), (rows, chunks, LEVELS), (rows, chunks), (rows, 2), (rows, CANDIDATES))
        kinds = (torch.float32, torch.int32, torch.int64, torch.int32, torch.float32)
        return cls(*[torch.empty(size, dtype=kind, device=device) for size, kind in zip(sizes, kinds, strict=True)])


class RowSampling(NamedTuple):
    """Holds the sampling parameters of each row: [S] each."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


class Levels(NamedTuple):
    """Holds the constants by which weights are counted."""

    shift: int
    levels: int
    candidates: int


@triton.jit
def _weigh_all(
    logits,
    maxima,
    limits,
    scratch,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Stores weights, the mass of each chunk, and how many weights of a chunk each level has."""
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_previous(PDL)
    heat = tl.load(limits.temperature + row)
    if heat == 0.0:
        return
    token, values = load_chunk(logits, row, chunk, vocab, CHUNK)
    weight = weigh(values, row_maximum(maxima, row, chunks, CHUNKS), heat)
    tl.store(scratch.weights + row * vocab + token, weight, token < vocab)
    level = weight.to(tl.int32, bitcast=True) >> LEVELS.shift
    count = tl.histogram(level, LEVELS.levels)
    tl.store(scratch.counts + (row * chunks + chunk) * LEVELS.levels + tl.arange(0, LEVELS.levels), count)
    mass = tl.where(weight >= tl.load(limits.min_p + row), mass_of(weight), 0)
    tl.store(scratch.masses + row * chunks + chunk, tl.sum(mass, 0))


@triton.jit
def _find_level(limits, scratch, chunks, LEVELS: tl.constexpr, PDL: tl.constexpr):
    """Stores the lowest level at and above which no more weights lie than there may be candidates."""
    let_next_start(PDL)
    COUNT: tl.constexpr = LEVELS.levels
    row = tl.program_id(0).to(tl.int64)
    level = tl.arange(0, COUNT)
    total = tl.zeros([COUNT], tl.int32)
    wait_for_previous(PDL)
    if tl.load(limits.temperature + row) == 0.0:
        return
    for chunk in range(0, chunks):
        total += tl.load(scratch.counts + (row * chunks + chunk) * COUNT + level)
    above = tl.sum(total, 0) - tl.cumsum(total, 0) + total
    lowest = tl.min(tl.where((above <= LEVELS.candidates) & (level > 0), level, COUNT), 0)
    tl.store(scratch.levels + row * 2, lowest << LEVELS.shift)
    tl.store(scratch.levels + row * 2 + 1, 0)


@triton.jit
def _gather_candidates(limits, scratch, vocab, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    wait_for_previous(PDL)
    if tl.load(limits.temperature + row) == 0.0:
        return
    weight = tl.load(scratch.weights + row * vocab + token, token < vocab, 0.0)
    taken = weight.to(tl.int32, bitcast=True) >= tl.load(scratch.levels + row * 2)
    count = tl.sum(taken.to(tl.int32), 0)
    if count > 0:
        first = tl.atomic_add(scratch.levels + row * 2 + 1, count)
        place = first + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(scratch.candidates + row * LEVELS.candidates + place, weight, taken)


@triton.jit
def _above(weights, base, bits, floor, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns how many weights have at least these bits (and the floor), or their mass."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + base + token, token < vocab, 0.0)
        kept = (weight.to(tl.int32, bitcast=True) >= bits) & (weight >= floor) & (token < vocab)
        total += tl.where(kept, mass_of(weight), 0) if MASS else kept.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def halved(low, high, middle, enough):
    return tl.where(enough, middle, low), tl.where(enough, high, middle - 1)


@triton.jit
def _highest_bits(weights, base, needed, floor, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest bits that still leave `needed` above them, among all weights."""
    low = 0
    high = 0x3F800000  # 1.0, the largest weight
    for _ in range(30):
        middle = (low + high + 1) >> 1
        enough = _above(weights, base, middle, floor, vocab, MASS, BLOCK) >= needed
        low, high = halved(low, high, middle, enough)
    return low


@triton.jit
def _highest_of_candidates(bits, amount, needed):
    """Returns the largest bits that still leave `needed` above them, among candidates that count `amount` each."""
    low = 0
    high = 0x3F800000
    for _ in range(30):
        middle = (low + high + 1) >> 1
        enough = tl.sum(tl.where(bits >= middle, amount, 0), 0) >= needed
        low, high = halved(low, high, middle, enough)
    return low


@triton.jit
def _sampling_threshold(
    limits,
    scratch,
    least,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    heat = tl.load(limits.temperature + row)
    k = tl.load(limits.top_k + row)
    p = tl.load(limits.top_p + row)
    floor = tl.load(limits.min_p + row)
    by_rank = (k > 0) & (k < vocab)
    if (heat > 0.0) & (by_rank | (p < 1.0)):
        weights, base = scratch.weights, row * vocab
        count = tl.load(scratch.levels + row * 2 + 1)
        index = tl.arange(0, CANDIDATES)
        weight = tl.load(scratch.candidates + row * CANDIDATES + index, index < count, 0.0)
        bits = tl.where(index < count, weight.to(tl.int32, bitcast=True), -1)
        among_candidates = by_rank & (k <= count)
        if by_rank:
            if among_candidates:
                found = _highest_of_candidates(bits, tl.full([CANDIDATES], 1, tl.int64), k.to(tl.int64))
            else:
                found = _highest_bits(weights, base, k.to(tl.int64), 0.0, vocab, False, BLOCK)
            floor = tl.maximum(floor, found.to(tl.float32, bitcast=True))
        if p < 1.0:
            mass = tl.where((index < count) & (weight >= floor), mass_of(weight), 0)
            chunk = tl.arange(0, CHUNKS)
            whole = tl.sum(tl.load(scratch.masses + row * chunks + chunk, chunk < chunks, 0), 0)
            if among_candidates:
                whole = tl.sum(mass, 0)
            if by_rank & (k > count):
                whole = _above(weights, base, 0, floor, vocab, True, BLOCK)
            needed = tl.ceil(p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
            if tl.sum(mass, 0) >= needed:
                found = _highest_of_candidates(bits, mass, needed)
            else:
                found = _highest_bits(weights, base, needed, floor, vocab, True, BLOCK)
            floor = tl.maximum(floor, found.to(tl.float32, bitcast=True))
    tl.store(least + row, floor)


def sampling_threshold(
    logits: Any,
    maxima: Any,
    scratch: ThresholdScratch,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    least: Any,
) -> None:
    """Writes the threshold of each row to least [S], from logits [S, vocab] and the maxima of their chunks."""
    rows, vocab = logits.shape
    chunks = maxima.shape[1]
    whole = triton.next_power_of_2(chunks)
    levels = Levels(SHIFT, LEVELS, scratch.candidates.shape[1])
    limits = RowSampling(temperature, top_k, top_p, min_p)
    # No two steps of `weigh` may be fused into one instruction.
    exact = {**launch_options(8), "enable_fp_fusion": False}
    _weigh_all[(rows, chunks)](
        logits, maxima, limits, scratch, vocab, chunks, CHUNK=CHUNK, CHUNKS=whole, LEVELS=levels, **exact
    )
    _find_level[(rows,)](limits, scratch, chunks, LEVELS=levels, **launch_options())
    _gather_candidates[(rows, chunks)](limits, scratch, vocab, CHUNK=CHUNK, LEVELS=levels, **launch_options(8))
    block = min(BLOCK, triton.next_power_of_2(vocab))
    sizes = {"CHUNKS": whole, "CANDIDATES": levels.candidates, "BLOCK": block}
    _sampling_threshold[(rows,)](limits, scratch, least, vocab, chunks, **sizes, **launch_options(8))

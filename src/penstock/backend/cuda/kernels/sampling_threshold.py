"""The smallest weight that top_k, top_p and min_p leave, without a sort.

Weights are not negative, so they order as their bits do. Counts by their leading bits give a level above which only a
few thousand lie; among those the threshold is found by halving the range of bits thirty times, and counting or weighing
what lies above each time. Where so few do not decide it, the same is done over all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.backend.cuda.kernels.sample_tokens import CHUNK, mass_of, row_peak, weigh

BLOCK = 8192
CANDIDATES = 2048  # weights among which the threshold is looked for first
SHIFT = 21
LEVELS = 512  # the bits of 1, the largest weight, without the last 21, and some


class ThresholdScratch(NamedTuple):
    """What the passes leave for each other."""

    weights: Any  # [S, vocab] float32
    counts: Any  # [S, chunks, LEVELS] int32
    masses: Any  # [S, chunks] int64
    levels: Any  # [S, 2] int32: the lowest bits of the few, and how many there are
    few: Any  # [S, CANDIDATES] float32

    @classmethod
    def on(cls, device: torch.device, rows: int, vocab: int) -> ThresholdScratch:
        chunks = triton.cdiv(vocab, CHUNK)
        sizes = ((rows, vocab), (rows, chunks, LEVELS), (rows, chunks), (rows, 2), (rows, CANDIDATES))
        kinds = (torch.float32, torch.int32, torch.int64, torch.int32, torch.float32)
        return cls(*[torch.empty(size, dtype=kind, device=device) for size, kind in zip(sizes, kinds, strict=True)])


@triton.jit
def _weigh_all(
    logits,
    peaks,
    temperature,
    min_p,
    weights,
    counts,
    masses,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHIFT: tl.constexpr,
    LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weights, their masses, and how many there are of each level."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if PDL:
        gdc_wait()
    heat = tl.load(temperature + row)
    if heat == 0.0:
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * vocab + token, token < vocab, -float("inf"))
    weight = weigh(values, row_peak(peaks, row, chunks, CHUNKS), heat)
    tl.store(weights + row * vocab + token, weight, token < vocab)
    level = weight.to(tl.int32, bitcast=True) >> SHIFT
    count = tl.histogram(level, LEVELS)
    tl.store(counts + (row * chunks + chunk) * LEVELS + tl.arange(0, LEVELS), count)
    mass = tl.where(weight >= tl.load(min_p + row), mass_of(weight), 0)
    tl.store(masses + row * chunks + chunk, tl.sum(mass, 0))


@triton.jit
def _find_level(
    counts,
    temperature,
    levels,
    chunks,
    SHIFT: tl.constexpr,
    LEVELS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The lowest level at and above which there are at most CANDIDATES weights."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    level = tl.arange(0, LEVELS)
    total = tl.zeros([LEVELS], tl.int32)
    if PDL:
        gdc_wait()
    if tl.load(temperature + row) == 0.0:
        return
    for chunk in range(0, chunks):
        total += tl.load(counts + (row * chunks + chunk) * LEVELS + level)
    above = tl.sum(total, 0) - tl.cumsum(total, 0) + total
    lowest = tl.min(tl.where((above <= CANDIDATES) & (level > 0), level, LEVELS), 0)
    tl.store(levels + row * 2, lowest << SHIFT)
    tl.store(levels + row * 2 + 1, 0)


@triton.jit
def _take_few(
    weights,
    temperature,
    levels,
    few,
    vocab,
    CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gathers the weights at and above the level, in any order."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
    if tl.load(temperature + row) == 0.0:
        return
    weight = tl.load(weights + row * vocab + token, token < vocab, 0.0)
    taken = weight.to(tl.int32, bitcast=True) >= tl.load(levels + row * 2)
    count = tl.sum(taken.to(tl.int32), 0)
    if count > 0:
        first = tl.atomic_add(levels + row * 2 + 1, count)
        place = first + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(few + row * CANDIDATES + place, weight, taken)


@triton.jit
def _above(weights, base, bits, floor, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many weights have at least these bits (and the floor), or their mass."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + base + token, token < vocab, 0.0)
        kept = (weight.to(tl.int32, bitcast=True) >= bits) & (weight >= floor) & (token < vocab)
        total += tl.where(kept, mass_of(weight), 0) if MASS else kept.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _highest_bits(weights, base, needed, floor, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest bits that still leave `needed` above them."""
    low = 0
    high = 0x3F800000  # of 1, the largest weight
    for _ in range(30):
        middle = (low + high + 1) >> 1
        enough = _above(weights, base, middle, floor, vocab, MASS, BLOCK) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _highest_of_few(bits, amount, needed):
    """The same among few: `amount` of each counts for it."""
    low = 0
    high = 0x3F800000
    for _ in range(30):
        middle = (low + high + 1) >> 1
        enough = tl.sum(tl.where(bits >= middle, amount, 0), 0) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _sampling_threshold(
    weights,
    masses,
    levels,
    few,
    temperature,
    top_k,
    top_p,
    min_p,
    least,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.load(min_p + row)
    by_rank = (k > 0) & (k < vocab)
    if (heat > 0.0) & (by_rank | (p < 1.0)):
        base = row * vocab
        count = tl.load(levels + row * 2 + 1)
        index = tl.arange(0, CANDIDATES)
        weight = tl.load(few + row * CANDIDATES + index, index < count, 0.0)
        bits = tl.where(index < count, weight.to(tl.int32, bitcast=True), -1)
        among_few = by_rank & (k <= count)
        if by_rank:
            if among_few:
                found = _highest_of_few(bits, tl.full([CANDIDATES], 1, tl.int64), k.to(tl.int64))
            else:
                found = _highest_bits(weights, base, k.to(tl.int64), 0.0, vocab, False, BLOCK)
            floor = tl.maximum(floor, found.to(tl.float32, bitcast=True))
        if p < 1.0:
            mass = tl.where((index < count) & (weight >= floor), mass_of(weight), 0)
            chunk = tl.arange(0, CHUNKS)
            whole = tl.sum(tl.load(masses + row * chunks + chunk, chunk < chunks, 0), 0)
            if among_few:
                whole = tl.sum(mass, 0)
            if by_rank & (k > count):
                whole = _above(weights, base, 0, floor, vocab, True, BLOCK)
            needed = tl.ceil(p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
            if tl.sum(mass, 0) >= needed:
                found = _highest_of_few(bits, mass, needed)
            else:
                found = _highest_bits(weights, base, needed, floor, vocab, True, BLOCK)
            floor = tl.maximum(floor, found.to(tl.float32, bitcast=True))
    tl.store(least + row, floor)


def sampling_threshold(
    logits: Any, peaks: Any, room: ThresholdScratch, temperature: Any, top_k: Any, top_p: Any, min_p: Any, least: Any
) -> None:
    """least [S] from logits [S, vocab] and the peaks of their chunks."""
    rows, vocab = logits.shape
    chunks = peaks.shape[1]
    whole = {"CHUNKS": triton.next_power_of_2(chunks)}
    grid, few = (rows, chunks), room.few.shape[1]
    _weigh_all[grid](
        logits,
        peaks,
        temperature,
        min_p,
        room.weights,
        room.counts,
        room.masses,
        vocab,
        chunks,
        CHUNK=CHUNK,
        SHIFT=SHIFT,
        LEVELS=LEVELS,
        **whole,
        **{**options(8), "enable_fp_fusion": False},
    )
    _find_level[(rows,)](
        room.counts, temperature, room.levels, chunks, SHIFT=SHIFT, LEVELS=LEVELS, CANDIDATES=few, **options()
    )
    _take_few[grid](room.weights, temperature, room.levels, room.few, vocab, CHUNK=CHUNK, CANDIDATES=few, **options(8))
    _sampling_threshold[(rows,)](
        room.weights,
        room.masses,
        room.levels,
        room.few,
        temperature,
        top_k,
        top_p,
        min_p,
        least,
        vocab,
        chunks,
        CANDIDATES=few,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        **whole,
        **options(8),
    )

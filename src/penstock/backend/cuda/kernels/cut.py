"""The smallest weight that top_k, top_p and min_p leave, without a sort.

Weights are not negative, so they order as their bits do: the threshold is found by halving the range of bits thirty
times, and counting or weighing what lies above each time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.choose import mass_of, row_peak, weigh
from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options

BLOCK = 8192


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
def _cut(
    logits,
    peaks,
    weights,
    temperature,
    top_k,
    top_p,
    min_p,
    least,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
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
        peak = row_peak(peaks, row, chunks, CHUNKS)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            values = tl.load(logits + base + token, token < vocab, -float("inf"))
            tl.store(weights + base + token, weigh(values, peak, heat), token < vocab)
        tl.debug_barrier()
        if by_rank:
            bits = _highest_bits(weights, base, k.to(tl.int64), 0.0, vocab, False, BLOCK)
            floor = tl.maximum(floor, bits.to(tl.float32, bitcast=True))
        if p < 1.0:
            whole = _above(weights, base, 0, floor, vocab, True, BLOCK)
            needed = tl.ceil(p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
            bits = _highest_bits(weights, base, needed, floor, vocab, True, BLOCK)
            floor = tl.maximum(floor, bits.to(tl.float32, bitcast=True))
    tl.store(least + row, floor)


def cut(
    logits: Any, peaks: Any, weights: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, least: Any
) -> None:
    """least [S] from logits [S, vocab]; `weights` [S, vocab] is written over."""
    rows, vocab = logits.shape
    chunks = peaks.shape[1]
    _cut[(rows,)](
        logits,
        peaks,
        weights,
        temperature,
        top_k,
        top_p,
        min_p,
        least,
        vocab,
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        **{**options(16), "enable_fp_fusion": False},
    )

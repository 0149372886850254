"""Samples tokens from logits just as backend/sample.py defines it: bit for bit, in three passes that need no sort.

A row of logits is read in chunks by many programs at once: first their highest values, then, where something is drawn,
their masses; then one program for each row finds the chunk and the token in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous

CHUNK = 4096
NO_TOKEN = tl.constexpr(-1)


class ChunkScratch(NamedTuple):
    """Holds intermediate results for each chunk of each row: [S, chunks] each."""

    maxima: Any  # float32
    where: Any  # int32, the token of each maximum
    masses: Any  # int64


@triton.jit
def weigh(logits, peak, temperature):
    """Returns e^((logits - peak) / temperature), in the steps of sample.weigh; fusing any two of them would
    change the bits."""
    x = tl.div_rn(logits.to(tl.float32), temperature) - tl.div_rn(peak, temperature)
    bounded = tl.maximum(x, -100.0)
    n = (bounded * 1.44269504 + 12582912.0) - 12582912.0  # rounds to the nearest whole number, halves to even
    r = bounded - n * 0.693359375 - n * -2.12194440e-4
    power = r * (1 / 5040) + (1 / 720)
    power = power * r + (1 / 120)
    power = power * r + (1 / 24)
    power = power * r + (1 / 6)
    power = power * r + 0.5
    power = power * r + 1.0
    power = power * r + 1.0
    two_to_n = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x >= -87.0, power * two_to_n, 0.0)


@triton.jit
def mass_of(weight):
    """Returns a weight as a whole number of 2 ** -40, so that sums do not depend on their order."""
    return (weight * 1099511627776.0).to(tl.int64)


@triton.jit
def row_maximum(maxima, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(maxima + row * chunks + chunk, chunk < chunks, -float("inf")), 0)


@triton.jit
def load_chunk(logits, row, chunk, vocab, CHUNK: tl.constexpr):
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    return token, tl.load(logits + row * vocab + token, token < vocab, -float("inf"))


@triton.jit
def _chunk_maxima(logits, maxima, where, vocab, chunks, CHUNK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_previous(PDL)
    _, values = load_chunk(logits, row, chunk, vocab, CHUNK)
    values = tl.where(values == values, values, -float("inf"))  # NaN is impossible
    highest, at = tl.max(values, 0, return_indices=True)
    tl.store(maxima + row * chunks + chunk, highest)
    tl.store(where + row * chunks + chunk, chunk * CHUNK + at)


@triton.jit
def _chunk_masses(
    logits, scratch, temperature, least, vocab, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_previous(PDL)
    heat = tl.load(temperature + row)
    if heat == 0.0:
        return
    _, values = load_chunk(logits, row, chunk, vocab, CHUNK)
    weight = weigh(values, row_maximum(scratch.maxima, row, chunks, CHUNKS), heat)
    mass = mass_of(tl.where(weight < tl.load(least + row), 0.0, weight))
    tl.store(scratch.masses + row * chunks + chunk, tl.sum(mass, 0))


@triton.jit
def _draw(
    logits,
    scratch,
    temperature,
    least,
    seeds,
    target,
    slots,
    last,
    out,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    wait_for_previous(PDL)
    maxima = tl.load(scratch.maxima + row * chunks + chunk, chunk < chunks, -float("inf"))
    highest, best = tl.max(maxima, 0, return_indices=True)
    token = tl.load(scratch.where + row * chunks + best)
    heat = tl.load(temperature + row)
    if heat > 0.0:
        mass = tl.load(scratch.masses + row * chunks + chunk, chunk < chunks, 0)
        total = tl.sum(mass, 0)
        if total > 0:
            low = tl.load(seeds + row * 2).to(tl.uint32, bitcast=True).to(tl.uint64)
            high = tl.load(seeds + row * 2 + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
            uniform = (high << 32 | low) >> 11  # 53 bits
            whole = total.to(tl.uint64)
            wanted = (tl.umulhi(uniform, whole) << 11 | (uniform * whole) >> 53).to(tl.int64)
            upto = tl.cumsum(mass, 0)
            found = tl.min(tl.where(upto > wanted, chunk, CHUNKS - 1), 0)
            before = tl.sum(tl.where(chunk < found, mass, 0), 0)
            index, values = load_chunk(logits, row, found, vocab, CHUNK)
            weight = weigh(values, highest, heat)
            own = mass_of(tl.where(weight < tl.load(least + row), 0.0, weight))
            reached = before + tl.cumsum(own, 0) > wanted
            token = tl.min(tl.where(reached, index, vocab - 1), 0)
    known = tl.load(target + row)
    finite = tl.abs(highest) < float("inf")
    tl.store(out + row, tl.where(known >= 0, known, tl.where(finite, token, NO_TOKEN)))
    tl.store(last + tl.load(slots + row), tl.where(known >= 0, known, token))  # the next step may read it already


def sample_tokens(
    logits: Any,
    temperature: Any,
    least: Any | None,
    seeds: Any,
    target: Any,
    slots: Any,
    last: Any,
    out: Any,
    scratch: tuple[Any, Any, Any],
    *,
    draws: bool,
) -> None:
    """Writes the token for logits[s] to out[s] and to last[slots[s]]. `draws`: some row has a temperature; `least` [S]:
    the smallest weight that may be drawn; scratch [S, chunks]: highest logits, their tokens, and masses."""
    rows, vocab = logits.shape
    chunk = ChunkScratch(*scratch)
    chunks = triton.cdiv(vocab, CHUNK)
    # No two steps of `weigh` may be fused into one instruction.
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(chunks)}
    exact = {**sizes, **launch_options(8), "enable_fp_fusion": False}
    if draws:
        _chunk_masses[(rows, chunks)](logits, chunk, temperature, least, vocab, chunks, **exact)
    _draw[(rows,)](logits, chunk, temperature, least, seeds, target, slots, last, out, vocab, chunks, **exact)


def find_chunk_maxima(logits: Any, maxima: Any, where: Any) -> None:
    """Writes the highest logit of each chunk of each row, and its token: [S, vocab] -> 2 * [S, chunks]."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    _chunk_maxima[(rows, chunks)](logits, maxima, where, vocab, chunks, CHUNK=CHUNK, **launch_options(8))

"""Routing of tokens to experts, and the permutation that groups token-expert pairs by expert.

A token's experts are those with its best scores, best first. For many tokens, pairs are permuted so that those of one
expert are neighbours, and products run over blocks of neighbours. Pairs are counted, not sorted: one program per expert
reads all choices. Nothing here depends on a number that the host would have to know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import gdc_launch_dependents, gdc_wait, options
from penstock.model.spec import ExpertSpec

AT_ONCE = 1024  # choices that a program reads at a time


@triton.jit
def best_groups(
    merits,
    expert,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BY_TWO: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Whether each expert belongs to one."""
    group = tl.arange(0, PADDED)
    best = tl.full([PADDED], -float("inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        mine = tl.where(expert // SIZE == g, merits, -float("inf"))
        most, at = tl.max(mine, 0, return_indices=True)
        if BY_TWO and SIZE > 1:
            most += tl.max(tl.where(expert == at, -float("inf"), mine), 0)
        best = tl.where(group == g, most, best)
    allowed = expert < 0
    for _ in tl.static_range(CHOSEN):
        _, at = tl.max(best, 0, return_indices=True)
        allowed = allowed | (expert // SIZE == at)
        best = tl.where(group == at, -float("inf"), best)
    return allowed


@triton.jit
def _route(
    logits,
    bias,
    experts,
    weights,
    scale,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    RANKS: tl.constexpr,
    SCORING: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    rank = tl.arange(0, RANKS)
    inside = expert < COUNT
    if PDL:
        gdc_wait()
    scores = tl.load(logits + token * COUNT + expert, inside, -float("inf")).to(tl.float32)
    if SCORING == "softmax":
        powers = tl.exp(scores - tl.max(scores, 0))
        scores = powers / tl.sum(powers, 0)
    if SCORING == "sigmoid":
        scores = 1 / (1 + tl.exp(-scores))
    merits = scores
    if BIAS:
        merits += tl.load(bias + expert, inside, 0.0)
    merits = tl.where(inside & (merits == merits), merits, -float("inf"))
    if CHOSEN_GROUPS < GROUPS:
        allowed = best_groups(merits, expert, COUNT // GROUPS, GROUPS, CHOSEN_GROUPS, BY_TWO, PADDED_GROUPS)
        merits = tl.where(allowed, merits, -float("inf"))
    chosen = tl.full([RANKS], 0, tl.int32)
    weight = tl.full([RANKS], 0.0, tl.float32)
    for i in tl.static_range(CHOSEN):
        _, at = tl.max(merits, 0, return_indices=True)
        at = tl.minimum(at, COUNT - 1)
        merits = tl.where(expert == at, -float("inf"), merits)
        chosen = tl.where(rank == i, at, chosen)
        weight = tl.where(rank == i, tl.sum(tl.where(expert == at, scores, 0.0), 0), weight)
    if SCORING == "softmax_top_k":
        weight = tl.where(rank < CHOSEN, weight, -float("inf"))
        weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / tl.sum(weight, 0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(experts + token * CHOSEN + rank, chosen, rank < CHOSEN)
    tl.store(weights + token * CHOSEN + rank, weight * scale, rank < CHOSEN)


def route(logits: Any, bias: Any | None, spec: ExpertSpec, experts: Any, weights: Any) -> None:
    """The experts of each token, the best one first, and their weights: [T, count] -> 2 * [T, chosen]."""
    _route[(len(logits),)](
        logits,
        logits if bias is None else bias,
        experts,
        weights,
        spec.scale,
        COUNT=spec.count,
        PADDED=triton.next_power_of_2(spec.count),
        CHOSEN=spec.top_k,
        RANKS=triton.next_power_of_2(spec.top_k),
        SCORING=spec.scoring,
        BIAS=bias is not None,
        RENORMALIZE=spec.renormalize,
        GROUPS=spec.groups,
        CHOSEN_GROUPS=spec.top_k_groups,
        BY_TWO=spec.group_score == "top2",
        PADDED_GROUPS=triton.next_power_of_2(spec.groups),
        **options(1),
    )


class ExpertPermutation(NamedTuple):
    """Who sits where, and the blocks that products take."""

    pairs: Any  # [T * chosen] of each seat: its token's number * chosen + the rank of its expert
    counts: Any  # [count + 1] seats of each expert; then how many blocks there are
    blocks: Any  # [most blocks, 3] expert, first seat, how many seats

    @classmethod
    def on(cls, device: torch.device, spec: ExpertSpec, tokens: int) -> ExpertPermutation:
        ints = {"dtype": torch.int32, "device": device}
        pairs = tokens * spec.top_k
        return cls(
            torch.zeros(pairs, **ints),
            torch.zeros(spec.count + 1, **ints),
            torch.zeros((most_blocks(pairs, spec.count, SMALLEST_BLOCK), 3), **ints),
        )


SMALLEST_BLOCK = 16  # seats of a block


def most_blocks(pairs: int, count: int, size: int) -> int:
    """However they are shared out."""
    return min(pairs, count) + pairs // size


@triton.jit(do_not_specialize=["pairs"])
def _count_pairs(experts, counts, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    if PDL:
        gdc_wait()
    for first in range(0, pairs, BLOCK):
        found += (tl.load(experts + first + at, first + at < pairs, -1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs"])
def _permute_pairs(
    experts,
    counts,
    seats,
    blocks,
    pairs,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    expert = tl.program_id(0)
    other = tl.arange(0, PADDED)
    at = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    taken = tl.load(counts + other, other < COUNT, 0)
    before = other < expert
    seat = tl.sum(tl.where(before, taken, 0), 0)
    block = tl.sum(tl.where(before, tl.cdiv(taken, SIZE), 0), 0)
    mine = tl.sum(tl.where(other == expert, taken, 0), 0)
    for first in range(0, mine, SIZE):
        entry = blocks + (block + first // SIZE) * 3
        tl.store(entry, expert)
        tl.store(entry + 1, seat + first)
        tl.store(entry + 2, tl.minimum(mine - first, SIZE))
    if expert == COUNT - 1:
        tl.store(counts + COUNT, block + tl.cdiv(mine, SIZE))
    for first in range(0, pairs, BLOCK):
        match = (tl.load(experts + first + at, first + at < pairs, -1) == expert).to(tl.int32)
        tl.store(seats + seat + tl.cumsum(match, 0) - 1, first + at, match > 0)
        seat += tl.sum(match, 0)


def permute_pairs(experts: Any, seats: ExpertPermutation, size: int) -> None:
    """For blocks of up to `size` seats."""
    pairs, count = experts.numel(), len(seats.counts) - 1
    _count_pairs[(count,)](experts, seats.counts, pairs, BLOCK=AT_ONCE, **options())
    _permute_pairs[(count,)](
        experts,
        seats.counts,
        seats.pairs,
        seats.blocks,
        pairs,
        COUNT=count,
        PADDED=triton.next_power_of_2(count),
        SIZE=size,
        BLOCK=AT_ONCE,
        **options(),
    )


@triton.jit
def _combine_experts(given, weights, out, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    if PDL:
        gdc_wait()
    for i in tl.static_range(CHOSEN):
        pair = token * CHOSEN + i
        total += tl.load(weights + pair) * tl.load(given + pair * width + column, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), inside)


def combine_experts(given: Any, weights: Any, out: Any) -> None:
    """out [T, width] = what each token's experts gave, [T * chosen, width], weighed: in the order of their scores."""
    (tokens, width), chosen = out.shape, weights.shape[1]
    block = min(triton.next_power_of_2(width), 1024)
    _combine_experts[(tokens, triton.cdiv(width, block))](
        given, weights, out, width, CHOSEN=chosen, BLOCK=block, **options()
    )

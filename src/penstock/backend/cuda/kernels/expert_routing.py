"""Routing of tokens to experts, and the permutation that groups token-expert pairs by expert.

A token's experts are those with its best scores, best first. For many tokens, pairs are permuted so that each expert's
pairs are neighbours, and products run over blocks of neighbours. Pairs are counted, not sorted: one program per expert
reads all choices. Nothing here depends on a number that the host would have to know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous
from penstock.model.spec import ExpertSpec

AT_ONCE = 1024  # choices that a program reads at a time


class Routing(NamedTuple):
    """Holds the constants of how experts are chosen."""

    experts: int
    chosen: int
    scoring: str
    renormalize: bool
    groups: int
    chosen_groups: int
    by_two: bool  # a group is as good as the sum of its two best experts


@triton.jit
def best_groups(merits, expert, ROUTING: tl.constexpr):
    GROUPS: tl.constexpr = ROUTING.groups
    CHOSEN: tl.constexpr = ROUTING.chosen_groups
    SIZE: tl.constexpr = ROUTING.experts // ROUTING.groups
    PADDED: tl.constexpr = triton.next_power_of_2(GROUPS)
    group = tl.arange(0, PADDED)
    best = tl.full([PADDED], -float("inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        mine = tl.where(expert // SIZE == g, merits, -float("inf"))
        most, at = tl.max(mine, 0, return_indices=True)
        if ROUTING.by_two and SIZE > 1:
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
    expert_scale,
    experts,
    weights,
    scale,
    ROUTING: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    COUNT: tl.constexpr = ROUTING.experts
    CHOSEN: tl.constexpr = ROUTING.chosen
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    RANKS: tl.constexpr = triton.next_power_of_2(CHOSEN)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    rank = tl.arange(0, RANKS)
    inside = expert < COUNT
    wait_for_previous(PDL)
    scores = tl.load(logits + token * COUNT + expert, inside, -float("inf")).to(tl.float32)
    if ROUTING.scoring == "softmax":
        powers = tl.exp(scores - tl.max(scores, 0))
        scores = powers / tl.sum(powers, 0)
    if ROUTING.scoring == "sigmoid":
        scores = 1 / (1 + tl.exp(-scores))
    merits = scores
    if BIAS:
        merits += tl.load(bias + expert, inside, 0.0)
    merits = tl.where(inside & (merits == merits), merits, -float("inf"))
    if ROUTING.chosen_groups < ROUTING.groups:
        allowed = best_groups(merits, expert, ROUTING)
        merits = tl.where(allowed, merits, -float("inf"))
    chosen = tl.full([RANKS], 0, tl.int32)
    weight = tl.full([RANKS], 0.0, tl.float32)
    for i in tl.static_range(CHOSEN):
        _, at = tl.max(merits, 0, return_indices=True)
        at = tl.minimum(at, COUNT - 1)
        merits = tl.where(expert == at, -float("inf"), merits)
        chosen = tl.where(rank == i, at, chosen)
        weight = tl.where(rank == i, tl.sum(tl.where(expert == at, scores, 0.0), 0), weight)
    if ROUTING.scoring == "softmax_top_k":
        weight = tl.where(rank < CHOSEN, weight, -float("inf"))
        weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / tl.sum(weight, 0)
    if ROUTING.renormalize:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    if SCALED:
        weight *= tl.load(expert_scale + chosen)
    tl.store(experts + token * CHOSEN + rank, chosen, rank < CHOSEN)
    tl.store(weights + token * CHOSEN + rank, weight * scale, rank < CHOSEN)


def route(
    logits: Any, bias: Any | None, spec: ExpertSpec, experts: Any, weights: Any, expert_scale: Any | None = None
) -> None:
    """Writes the experts of each token, the best one first, and their weights: [T, count] -> 2 * [T, chosen]. Weights
    are multiplied by the scale of their experts, [count], where there is one."""
    routing = Routing(
        spec.count,
        spec.top_k,
        spec.scoring,
        spec.renormalize,
        spec.groups,
        spec.top_k_groups,
        spec.group_score == "top2",
    )
    given = {"BIAS": bias is not None, "SCALED": expert_scale is not None}
    _route[(len(logits),)](
        logits,
        logits if bias is None else bias,
        logits if expert_scale is None else expert_scale,
        experts,
        weights,
        spec.scale,
        ROUTING=routing,
        **given,
        **launch_options(1),
    )


class ExpertPermutation(NamedTuple):
    """Token-expert pairs grouped by expert, and the blocks of them that products take."""

    pairs: Any  # [T * chosen] each pair's token * chosen + the rank of its expert, grouped by expert
    counts: Any  # [count + 1] pairs of each expert; then how many blocks there are
    blocks: Any  # [most blocks, 3] expert, first pair, how many pairs

    @classmethod
    def on(cls, device: torch.device, spec: ExpertSpec, tokens: int) -> ExpertPermutation:
        ints = {"dtype": torch.int32, "device": device}
        pairs = tokens * spec.top_k
        return cls(
            torch.zeros(pairs, **ints),
            torch.zeros(spec.count + 1, **ints),
            torch.zeros((most_blocks(pairs, spec.count, SMALLEST_BLOCK), 3), **ints),
        )


SMALLEST_BLOCK = 16  # pairs of a block


def most_blocks(pairs: int, count: int, size: int) -> int:
    return min(pairs, count) + pairs // size


@triton.jit(do_not_specialize=["pairs"])
def _count_pairs(experts, counts, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    wait_for_previous(PDL)
    for first in range(0, pairs, BLOCK):
        found += (tl.load(experts + first + at, first + at < pairs, -1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["count"])
def _permute_pairs(
    experts, permutation, count, COUNT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    expert = tl.program_id(0)
    other = tl.arange(0, triton.next_power_of_2(COUNT))
    at = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    taken = tl.load(permutation.counts + other, other < COUNT, 0)
    before = other < expert
    place = tl.sum(tl.where(before, taken, 0), 0)
    block = tl.sum(tl.where(before, tl.cdiv(taken, SIZE), 0), 0)
    mine = tl.sum(tl.where(other == expert, taken, 0), 0)
    for first in range(0, mine, SIZE):
        entry = permutation.blocks + (block + first // SIZE) * 3
        tl.store(entry, expert)
        tl.store(entry + 1, place + first)
        tl.store(entry + 2, tl.minimum(mine - first, SIZE))
    if expert == COUNT - 1:
        tl.store(permutation.counts + COUNT, block + tl.cdiv(mine, SIZE))
    for first in range(0, count, BLOCK):
        match = (tl.load(experts + first + at, first + at < count, -1) == expert).to(tl.int32)
        tl.store(permutation.pairs + place + tl.cumsum(match, 0) - 1, first + at, match > 0)
        place += tl.sum(match, 0)


def permute_pairs(experts: Any, permutation: ExpertPermutation, size: int) -> None:
    pairs, count = experts.numel(), len(permutation.counts) - 1
    _count_pairs[(count,)](experts, permutation.counts, pairs, BLOCK=AT_ONCE, **launch_options())
    sizes = {"COUNT": count, "SIZE": size, "BLOCK": AT_ONCE}
    _permute_pairs[(count,)](experts, permutation, pairs, **sizes, **launch_options())


@triton.jit
def _combine_experts(given, weights, out, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    wait_for_previous(PDL)
    for i in tl.static_range(CHOSEN):
        pair = token * CHOSEN + i
        total += tl.load(weights + pair) * tl.load(given + pair * width + column, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), inside)


def combine_experts(given: Any, weights: Any, out: Any) -> None:
    """Computes out [T, width], the weighted sum of what each token's experts gave, [T * chosen, width], in the order of
    their scores."""
    (tokens, width), chosen = out.shape, weights.shape[1]
    block = min(triton.next_power_of_2(width), 1024)
    _combine_experts[(tokens, triton.cdiv(width, block))](
        given, weights, out, width, CHOSEN=chosen, BLOCK=block, **launch_options()
    )

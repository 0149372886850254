"""Gathers rows by number: the embeddings of tokens, the positions whose logits are wanted. Scatters rows to places."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.pdl import launch_options, let_next_start, wait_for_previous

MAX_TOKEN = 2**31 - 1


@triton.jit(do_not_specialize=["count", "vocab"])
def _resolve_tokens(
    tokens, slots, last, ids, out, count, vocab, MAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    wait_for_previous(PDL)
    token = tl.load(tokens + at, inside, 0)
    sampled = tl.load(last + tl.load(slots + at, inside, 0), inside, 0)
    if MAPS:
        sampled = tl.load(ids + sampled, inside, 0)
    token = tl.where(token < 0, sampled, token)
    tl.store(out + at, tl.where(token < vocab, token, 0), inside)


def resolve_tokens(
    tokens: Any, slots: Any, last: Any, out: Any, vocab: int = MAX_TOKEN, token_ids: Any | None = None
) -> None:
    """Writes the step's tokens to `out`; where one is LAST_SAMPLED, the token that its slot sampled in the step before,
    or what `token_ids` has in its place. Tokens from `vocab` on become 0."""
    count, maps = len(tokens), token_ids is not None
    ids = token_ids if maps else last
    how = {"MAPS": maps, "BLOCK": 256, **launch_options()}
    _resolve_tokens[(triton.cdiv(count, 256),)](tokens, slots, last, ids, out, count, vocab, **how)


@triton.jit
def _gather_rows(source, index, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_previous(PDL)
    picked = tl.load(index + row).to(tl.int64)
    value = tl.load(source + picked * width + column, inside, 0.0)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), inside)


def gather_rows(source: Any, index: Any, out: Any) -> None:
    """Writes row index[i] of `source` to out[i]."""
    rows, width = out.shape
    block = min(triton.next_power_of_2(width), 1024)
    _gather_rows[(rows, triton.cdiv(width, block))](source, index, out, width, BLOCK=block, **launch_options())


@triton.jit
def _scatter_rows(source, index, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = tl.load(index + row).to(tl.int64)
    wait_for_previous(PDL)
    value = tl.load(source + row * width + column, inside, 0.0)
    tl.store(out + place * width + column, value.to(out.dtype.element_ty), inside)


def scatter_rows(source: Any, index: Any, out: Any) -> None:
    """Writes source[i] to row index[i] of `out`."""
    rows, width = source.shape
    block = min(triton.next_power_of_2(width), 1024)
    _scatter_rows[(rows, triton.cdiv(width, block))](source, index, out, width, BLOCK=block, **launch_options())

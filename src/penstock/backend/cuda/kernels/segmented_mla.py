"""Multi-head latent attention (MLA) whose sums depend only on a token's own context: see segmented_attention.py.

Prompts, answers and drafts attend in the absorbed form, with one compiled kernel. A program has some pairs of token and
head of a run, and goes through a whole context or one segment of it. Where positions are selected, it leaves tokens
that see more of them to `mla_selected`, in which a program has all positions that a token selects.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.backend.cuda.kernels.kv_tile import (
    LOG2E,
    PagedKv,
    SplitKV,
    load_split,
    no_scores,
    store_mix,
    table_of,
)
from penstock.backend.cuda.kernels.mla_attention import ALL, MlaTiling, attend_mla, tiled
from penstock.backend.cuda.kernels.pdl import let_next_start, wait_for_previous
from penstock.backend.cuda.kernels.segmented_attention import join, join_in_order
from penstock.backend.cuda.segments import SEGMENT


@triton.jit
def _segmented_mla(
    q,
    kv,
    splits,
    out,
    split_kv,
    scale,
    SHAPE: tl.constexpr,
    LARGEST: tl.constexpr,
    TOP_K: tl.constexpr,
    RUN: tl.constexpr,
    SEGMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    HEADS: tl.constexpr = SHAPE.heads
    V_DIM: tl.constexpr = SHAPE.v_dim
    part, split = tl.program_id(0), tl.program_id(1)
    token = tl.load(splits + split * 8).to(tl.int64)
    tokens = tl.load(splits + split * 8 + 7)
    if (token < 0) | (part * SHAPE.queries >= tokens * HEADS):
        return
    row, begin, end, length, count, first = load_split(splits, split)
    if length - tokens >= TOP_K:
        wait_for_previous(PDL)  # the next kernel relies on it
        return
    table = table_of(kv, row)
    pair = part * SHAPE.queries + tl.arange(0, SHAPE.queries)
    own = tl.minimum(length - tokens + pair // HEADS, length - 1)  # pairs that are not there see what the newest does
    there = (pair < tokens * HEADS) & (own < TOP_K)
    v = tl.arange(0, SHAPE.block_v)
    wanted = there[:, None] & (v < V_DIM)[None, :]
    line = token * HEADS + pair
    wait_for_previous(PDL)
    softmax = no_scores(SHAPE.queries, SHAPE.block_v)
    for start in tl.range(begin, end, SEGMENT):
        stop = tl.minimum(start + SEGMENT, end)
        softmax = join(softmax, attend_mla(q, line, own, there, kv, table, start, stop, scale, SHAPE, LARGEST))
    which = split, first, count, split_kv.arrived + first * tl.num_programs(0) + part
    last, softmax = join_in_order(softmax, split_kv, which, pair, v, there, wanted, RUN * HEADS, V_DIM)
    if last:
        _, total, mix = softmax
        store_mix(out, line, v, mix, total, wanted, V_DIM)


def segmented_mla(
    q: Any,
    cache: Any,
    splits: Any,
    tables: Any,
    header: Any,
    out: Any,
    split_kv: SplitKV,
    v_dim: int,
    scale: float,
    scales: Any | None = None,
    top_k: int = ALL,
    *,
    run: int,
    tiling: MlaTiling,
) -> None:
    """Attends with runs of at most `run` tokens, whose queries are rotated and absorbed and whose keys are stored.
    splits [P, 8]: of one segment each or of a whole context. Tokens that see more than `top_k` positions are left to
    `mla_selected`."""
    shape, options = tiled(tiling, cache, scales, out, v_dim)
    kv = PagedKv(cache, splits if scales is None else scales, tables, header)
    _segmented_mla[(triton.cdiv(run * shape.heads, shape.queries), len(splits))](
        *(q, kv, splits, out, split_kv, scale * LOG2E),
        SHAPE=shape,
        TOP_K=top_k,
        RUN=run,
        SEGMENT=SEGMENT,
        enable_fp_fusion=False,
        **options,
    )

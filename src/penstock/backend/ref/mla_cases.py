"""Makes inputs of MLA, and of sparse attention, whose positions an index selects (see cases.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from penstock.backend.ref.cases import HALF, Case, Random, Trial, attention, inputs, scattered
from penstock.model import rope
from penstock.model.ops import Ops
from penstock.model.random_tensor import random_tensor
from penstock.model.spec import AttentionSpec, IndexSpec, RopeSpec
from penstock.model.tensor import FORMATS, Stack, Tensor


def attend_mla(rng: Random, *, spec: AttentionSpec, lengths: Sequence[int], longest: int = 16) -> Trial:
    """Computes MLA as `attend` does attention. Queries and what keys are made of are two tables."""

    def forward(ops: Ops[Any], queries: Any, keys: Any, gain: Any) -> Any:
        return ops.attend_mla(0, ops.embed(queries), ops.embed(keys), gain, spec, 1e-5)

    tables = [inputs(rng, sum(lengths), width) for width in (spec.q_width, spec.kv_width)]
    return Trial(forward, [*tables, random_tensor(rng, "F32", spec.v_dim)], *scattered(rng, lengths, longest))


def mla(heads: int, rotated: int, v_dim: int, *, interleaved: bool = True, **others: Any) -> Any:
    return attention(heads, 1, rotated + v_dim, interleaved=interleaved, rotated=rotated, v_dim=v_dim, **others)


def sparse(rng: Random, *, spec: AttentionSpec, lengths: Sequence[int], longest: int = 16, layers: int = 1) -> Trial:
    """Attends to selected positions in some layers, of which the first selects for all. The numbers of the index are
    small and whole, so that any cache holds them exactly: without RoPE many scores are equal, and their order counts.
    """
    index, tokens = spec.index, sum(lengths)
    assert index is not None
    others = replace(spec, index=replace(index, shared=True))

    def forward(ops: Ops[Any], queries: Any, keys: Any, gain: Any, q: Any, k: Any, weights: Any) -> Any:
        selected = ops.select_positions(0, ops.embed(q), ops.embed(k), ops.embed(weights), spec)
        y = ops.attend_mla(0, ops.embed(queries), ops.embed(keys), gain, spec, 1e-5, selected)
        for layer in range(1, layers):
            y = ops.add(ops.attend_mla(layer, ops.embed(queries), ops.embed(keys), gain, others, 1e-5, selected), y)
        return y

    tables = [inputs(rng, tokens, width) for width in (spec.q_width, spec.kv_width)]
    widths = index.heads * index.head_dim, index.head_dim, index.heads
    whole = [whole_numbers(rng, tokens, width) for width in widths]
    return Trial(forward, [*tables, random_tensor(rng, "F32", spec.v_dim), *whole], *scattered(rng, lengths, longest))


def whole_numbers(rng: Random, rows: int, width: int) -> Stack:
    """Returns a table of whole numbers from -3 to 3."""
    values = rng.integers(-3, 4, (rows, width)).astype(np.float32)
    return Stack([Tensor("whole", FORMATS["F32"], (rows, width), values.reshape(-1).view(np.uint8))], [None])


def indexed(heads: int, dims: int, top_k: int, *, rotated: int = 0, interleaved: bool = False) -> IndexSpec:
    freqs = rope.plain(100.0, rotated) if rotated else ()
    return IndexSpec(heads, dims, top_k, RopeSpec(freqs, interleaved))


MLA, MLA_SHARP = mla(20, 16, 16), mla(4, 16, 32, multiplier=0.7)
MLA_HALVES = mla(3, 16, 32, interleaved=False, scale=1.2)
WIDE, ODD = mla(6, 16, 48), mla(3, 6, 20)
FEW, ONE = replace(WIDE, index=indexed(4, 8, 5)), replace(ODD, index=indexed(3, 6, 1))
SOME = replace(ODD, index=indexed(5, 10, 33))
HALVES = replace(WIDE, index=indexed(7, 12, 6, rotated=8))
PAIRS = replace(WIDE, index=indexed(7, 12, 6, rotated=12, interleaved=True))

MLA_CASES = (
    Case("attend_mla", "one token", "F32", HALF, partial(attend_mla, spec=mla(4, 16, 32), lengths=(1,))),
    Case("attend_mla", "pairs", "F32", HALF, partial(attend_mla, spec=mla(6, 16, 48), lengths=(33, 1, 50))),
    Case("attend_mla", "halves", "F32", HALF, partial(attend_mla, spec=MLA_HALVES, lengths=(5, 40))),
    Case("attend_mla", "multiplier", "F32", HALF, partial(attend_mla, spec=MLA_SHARP, lengths=(5, 40))),
    Case("attend_mla", "one by one", "F32", HALF, partial(attend_mla, spec=MLA, lengths=(20,), longest=1)),
    Case("attend_mla", "long", "F32", HALF, partial(attend_mla, spec=MLA_SHARP, lengths=(600,), longest=60)),
    Case("attend_mla", "odd sizes", "F32", HALF, partial(attend_mla, spec=mla(5, 10, 38), lengths=(40, 3))),
    Case("attend_mla", "deepseek", "F32", HALF, partial(attend_mla, spec=mla(16, 64, 512), lengths=(9,))),
    Case("select_positions", "long", "F32", HALF, partial(sparse, spec=SOME, lengths=(1100,), longest=100)),
    Case("select_positions", "one", "F32", HALF, partial(sparse, spec=ONE, lengths=(5, 20), longest=1)),
    Case("select_positions", "not all", "F32", HALF, partial(sparse, spec=SOME, lengths=(32, 33, 34, 150), longest=70)),
    Case("select_positions", "few", "F32", HALF, partial(sparse, spec=FEW, lengths=(33, 1, 50))),
    Case("select_positions", "shared", "F32", HALF, partial(sparse, spec=FEW, lengths=(40, 9), layers=2)),
    Case("select_positions", "halves", "F32", HALF, partial(sparse, spec=HALVES, lengths=(17, 12))),
    Case("select_positions", "pairs", "F32", HALF, partial(sparse, spec=PAIRS, lengths=(14, 9))),
)

"""Makes inputs of MLA, and of sparse attention, whose positions an index selects (see cases.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from penstock.backend.ref.cases import BYTE, HALF, Case, Heads, Random, Trial, attention, inputs, scattered
from penstock.model import rope
from penstock.model.ops import MlaWeights, Ops
from penstock.model.random_tensor import random_tensor
from penstock.model.spec import AttentionSpec, IndexSpec, RopeSpec
from penstock.model.tensor import FORMATS, Stack, Tensor


def attend_mla(
    rng: Random,
    *,
    spec: AttentionSpec,
    lengths: Sequence[int],
    longest: int = 16,
    dims: tuple[int, int] = (24, 20),
    format: str = "F32",
) -> Trial:
    """Computes MLA as `attend` does attention, with `dims`: dimensions without RoPE, and of values. Queries and
    latents come from two tables."""

    def forward(ops: Ops[Any], queries: Any, keys: Any, *weights: Any) -> Any:
        return ops.attend_mla(0, ops.embed(queries), ops.embed(keys), MlaWeights(*weights), spec, 1e-5)

    weights = [*tables(rng, spec, sum(lengths), dims), *mla_weights(rng, spec, dims, format)]
    return Trial(forward, weights, *scattered(rng, lengths, longest))


def tables(rng: Random, spec: AttentionSpec, tokens: int, dims: tuple[int, int]) -> list[Stack]:
    query = dims[0] + spec.head_dim - spec.v_dim
    return [inputs(rng, tokens, width) for width in (spec.heads * query, spec.kv_width)]


def mla_weights(rng: Random, spec: AttentionSpec, dims: tuple[int, int], format: str = "F32") -> list[Tensor | Heads]:
    """Returns a gain, and matrices that keep what they multiply as large as it was if they have 32 bits."""
    nope, v_head_dim = dims
    shapes = (spec.heads, spec.v_dim, nope), (spec.heads, v_head_dim, spec.v_dim)
    matrices = [random_tensor(rng, format, *shape) for shape in shapes]
    for matrix in matrices if format == "F32" else ():
        matrix.data.view(np.float32)[:] *= matrix.shape[2] ** -0.5
    return [random_tensor(rng, "F32", spec.v_dim), *map(Heads, matrices)]


def mla(heads: int, rotated: int, v_dim: int, *, interleaved: bool = True, **others: Any) -> Any:
    return attention(heads, 1, rotated + v_dim, interleaved=interleaved, rotated=rotated, v_dim=v_dim, **others)


def sparse(rng: Random, *, spec: AttentionSpec, lengths: Sequence[int], longest: int = 16, layers: int = 1) -> Trial:
    """Attends to selected positions in some layers, of which the first selects for all. The numbers of the index are
    small and whole, so that any cache holds them exactly: without RoPE many scores are equal, and their order counts.
    """
    index, tokens = spec.index, sum(lengths)
    assert index is not None
    others = replace(spec, index=replace(index, shared=True))
    dims = 12, 10

    def forward(ops: Ops[Any], queries: Any, keys: Any, q: Any, k: Any, weights: Any, *matrices: Any) -> Any:
        selected = ops.select_positions(0, ops.embed(q), ops.embed(k), ops.embed(weights), spec)
        mla = MlaWeights(*matrices)
        y = ops.attend_mla(0, ops.embed(queries), ops.embed(keys), mla, spec, 1e-5, selected)
        for layer in range(1, layers):
            y = ops.add(ops.attend_mla(layer, ops.embed(queries), ops.embed(keys), mla, others, 1e-5, selected), y)
        return y

    widths = index.heads * index.head_dim, index.head_dim, index.heads
    whole = [whole_numbers(rng, tokens, width) for width in widths]
    weights = [*tables(rng, spec, tokens, dims), *whole, *mla_weights(rng, spec, dims)]
    return Trial(forward, weights, *scattered(rng, lengths, longest))


def whole_numbers(rng: Random, rows: int, width: int) -> Stack:
    values = rng.integers(-3, 4, (rows, width)).astype(np.float32)
    return Stack([Tensor("whole", FORMATS["F32"], (rows, width), values.reshape(-1).view(np.uint8))], [None])


def indexed(heads: int, dims: int, top_k: int, *, rotated: int = 0, interleaved: bool = False) -> IndexSpec:
    freqs = rope.plain(100.0, rotated) if rotated else ()
    return IndexSpec(heads, dims, top_k, RopeSpec(freqs, interleaved))


MLA, MLA_SHARP = mla(20, 16, 16), mla(4, 16, 32, multiplier=0.7)
MLA_HALVES = mla(3, 16, 32, interleaved=False, scale=1.2)
BLOCKS = mla(3, 32, 64, multiplier=0.02)  # fits every format
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
    Case(
        "attend_mla", "odd sizes", "F32", HALF, partial(attend_mla, spec=mla(5, 10, 38), lengths=(40, 3), dims=(9, 7))
    ),
    Case("attend_mla", "whole", "F32", HALF, partial(attend_mla, spec=WIDE, lengths=(150, 40), longest=150)),
    Case(
        "attend_mla", "deepseek", "F32", HALF, partial(attend_mla, spec=mla(16, 64, 512), lengths=(9,), dims=(128, 128))
    ),
    *(
        Case("attend_mla", f, f, t, partial(attend_mla, spec=BLOCKS, lengths=(5, 20), dims=(64, 40), format=f))
        for f, t in (("F16", HALF), ("BF16", 2 * HALF), ("Q8_0", 2 * BYTE), ("MXFP4", 2 * BYTE))
    ),
    Case("select_positions", "long", "F32", HALF, partial(sparse, spec=SOME, lengths=(1100,), longest=100)),
    Case("select_positions", "one", "F32", HALF, partial(sparse, spec=ONE, lengths=(5, 20), longest=1)),
    Case("select_positions", "not all", "F32", HALF, partial(sparse, spec=SOME, lengths=(32, 33, 34, 150), longest=70)),
    Case("select_positions", "few", "F32", HALF, partial(sparse, spec=FEW, lengths=(33, 1, 50))),
    Case("select_positions", "shared", "F32", HALF, partial(sparse, spec=FEW, lengths=(40, 9), layers=2)),
    Case("select_positions", "halves", "F32", HALF, partial(sparse, spec=HALVES, lengths=(18, 7))),
    Case("select_positions", "pairs", "F32", HALF, partial(sparse, spec=PAIRS, lengths=(14, 9))),
)

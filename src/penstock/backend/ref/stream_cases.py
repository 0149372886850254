"""Makes inputs of ops on columns and residual streams, and of attention that shares KV (see cases.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.ref.cases import (
    EXACT,
    FLOAT,
    HALF,
    Case,
    Random,
    Trial,
    all_at_once,
    attention,
    inputs,
    scattered,
)
from penstock.model.ops import Ops
from penstock.model.random_tensor import random_tensor
from penstock.model.spec import AttentionSpec
from penstock.model.tensor import Stack

TOKENS = 9


def of_tables(rng: Random, *, op: Callable[..., Any], widths: Sequence[int], gain: int = 0) -> Trial:
    def forward(ops: Ops[Any], *weights: Any) -> Any:
        tables, gains = weights[: len(widths)], weights[len(widths) :]
        return op(ops, *map(ops.embed, tables), *gains)

    gains = [random_tensor(rng, "F32", gain)] if gain else []
    return Trial(forward, [*(inputs(rng, TOKENS, width) for width in widths), *gains], all_at_once(TOKENS))


def partial_embed(rng: Random) -> Trial:
    tables = [Stack([random_tensor(rng, "F32", rows, 33)], [None]) for rows in (50, 20)]
    return Trial(
        lambda ops, whole, some: ops.add(ops.embed(whole), ops.embed(some, partial=True)),
        tables,
        [greedy_batch([Chunk([0, 19, 20, 49, 7], 0, [0])])],
    )


def attend_shared(rng: Random, *, spec: AttentionSpec, lengths: Sequence[int], longest: int) -> Trial:
    """Attends in one layer, and then with other queries to the keys and values that it wrote."""
    sharing = replace(spec, shares_kv=True)

    def forward(ops: Ops[Any], table: Any, queries: Any) -> Any:
        first = ops.attend(0, ops.embed(table), spec, {})
        return ops.add(ops.attend(0, ops.embed(queries), sharing, {}), first)

    tables = [inputs(rng, sum(lengths), width) for width in (spec.qkv_width, sharing.qkv_width)]
    return Trial(forward, tables, *scattered(rng, lengths, longest))


def norm_values(rng: Random) -> Trial:
    spec = attention(4, 2, 12, interleaved=False, qk_norm="head", v_norm=True)
    gains = [random_tensor(rng, "F32", 12) for _ in range(2)]
    return Trial(
        lambda ops, table, q, k: ops.norm_qk(ops.embed(table), q, k, spec, 1e-5),
        [inputs(rng, TOKENS, spec.qkv_width), *gains],
        all_at_once(TOKENS),
    )


def case(op: str, name: str, widths: Sequence[int], compute: Callable[..., Any], gain: int = 0) -> Case:
    return Case(op, name, "F32", FLOAT, partial(of_tables, op=compute, widths=widths, gain=gain))


SHARED, NEAR = (attention(6, 2, 16, interleaved=False, window=window) for window in (0, 7))
STREAM_CASES = (
    Case("embed", "partial", "F32", EXACT, partial_embed),
    Case("norm_qk", "values too", "F32", FLOAT, norm_values),
    case("norm_runs", "runs of 12", (60,), lambda ops, x, gain: ops.norm_runs(x, gain, 1e-5), gain=12),
    Case("attend", "shared KV", "F32", HALF, partial(attend_shared, spec=SHARED, lengths=(5, 40), longest=16)),
    Case("attend", "shared KV, windows", "F32", HALF, partial(attend_shared, spec=NEAR, lengths=(40,), longest=9)),
    Case("attend", "shared KV, one by one", "F32", HALF, partial(attend_shared, spec=SHARED, lengths=(20,), longest=1)),
    *(
        case("sparse_act_and_mul", act, (66,), lambda ops, x, act=act: ops.sparse_act_and_mul(x, act, 0.7))
        for act in ("gelu_tanh", "silu")
    ),
    case("gate_columns", "middle", (33, 100), lambda ops, x, y: ops.gate_columns(x, y, 40, "gelu_tanh")),
    case("take_columns", "end", (100,), lambda ops, x: ops.take_columns(x, 67, 33)),
    case("take_columns", "gains", (64,), lambda ops, x, gain: ops.take_columns(x, 0, 33, gain), gain=33),
    case("concat", "two widths", (33, 64), lambda ops, x, y: ops.concat(x, y)),
    case("match_rms", "three streams", (99, 33), lambda ops, x, y: ops.match_rms(x, y)),
    case("match_rms", "small values", (66, 33), lambda ops, x, y: ops.match_rms(ops.scale(x, 1e-4), y)),
    case("mix_streams", "four streams", (4 * 33, 16), lambda ops, x, c: ops.mix_streams(x, c)),
    case("correct_streams", "three streams", (99, 33, 3), lambda ops, x, y, c: ops.correct_streams(x, y, c, 1)),
    case("add_to_streams", "four streams", (4 * 33, 33), lambda ops, x, y: ops.add_to_streams(x, y)),
)

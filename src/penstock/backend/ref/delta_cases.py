"""Makes inputs of delta nets and of sigmoid_mul (see cases.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from penstock.backend.base import Batch, StateMove
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.ref.cases import BLOCK_SIZE, FLOAT, Case, Random, Trial, all_at_once, inputs
from penstock.backend.ref.random_steps import random_steps
from penstock.model.ops import DeltaWeights, Ops
from penstock.model.random_tensor import random_tensor
from penstock.model.recurrence import DeltaSpec
from penstock.model.tensor import Stack


def sigmoid_mul(rng: Random, *, width: int, gates: int) -> Trial:
    """Returns a trial whose gate has so many values in each row."""
    weight = Stack([random_tensor(rng, "F32", gates, width)], [None])
    return Trial(
        lambda ops, table, weight: ops.sigmoid_mul(ops.embed(table), ops.linear(ops.embed(table), weight)),
        [inputs(rng, 9, width), weight],
        all_at_once(9),
    )


def delta_net(rng: Random, *, spec: DeltaSpec, steps: Sequence[Batch], tokens: int) -> Trial:
    """Returns a trial whose states decay slowly, so that all earlier tokens count."""

    def forward(ops: Ops[Any], table: Any, gates: Any, *vectors: Any) -> Any:
        x = ops.embed(table)
        ba = ops.linear(x, gates)
        return ops.delta_net(0, x, ba, DeltaWeights(*vectors), spec, 1e-5)

    width = spec.width + spec.v_width
    sizes = spec.width * spec.conv_width, spec.v_heads, spec.v_heads, spec.v_dim
    conv, decay, dt_bias, gain = (random_tensor(rng, "F32", size) for size in sizes)
    decay.data.view(np.float32)[:] = -np.exp(rng.normal(-3, 1, spec.v_heads))
    gates = Stack([random_tensor(rng, "F32", 2 * spec.v_heads, width)], [None])
    gates.parts[0].data.view(np.float32)[:] *= width**-0.5
    return Trial(forward, [inputs(rng, tokens, width), gates, conv, decay, dt_bias, gain], steps, 1, states=8)


def in_chunks(rng: Random, *lengths: int, longest: int) -> list[Batch]:
    prompts = [range(length) for length in lengths]
    return [greedy_batch(chunks, i) for i, chunks in enumerate(random_steps(rng, prompts, BLOCK_SIZE, longest))]


def saved_and_begun() -> list[Batch]:
    """Returns steps in which a state is saved in the middle of a row and at its end; others go on from there in other
    slots, and the slot that it was saved from begins anew."""
    first = greedy_batch([Chunk(range(9), 0, [0], 0), Chunk(range(20, 22), 0, [0], 3)])
    then = greedy_batch([Chunk(range(30, 35), 5, [0], 1), Chunk(range(2), 0, [0], 0), Chunk(range(4), 2, [0], 3)], 1)
    last = greedy_batch([Chunk(range(40, 44), 8, [0], 2), Chunk(range(2, 6), 2, [0], 0), Chunk([7], 10, [0], 1)], 2)
    return [
        replace(first, moves=(StateMove(0, -1, 6, 5), StateMove(1, -1, 5, 2))),
        replace(then, moves=(StateMove(0, 6, 7, 3), StateMove(2, 5, -1, 0))),
        replace(last, moves=(StateMove(0, 7, -1, 0), StateMove(1, -1, 4, 4))),
    ]


DELTA = DeltaSpec(2, 4, 16, 16, 4)
TILED = DeltaSpec(2, 6, 16, 48, 4, tiled=True)
ODD = DeltaSpec(3, 3, 5, 21, 2)
LARGE = DeltaSpec(1, 1, 128, 128, 4)
LONG = DeltaSpec(1, 1, 32, 16, 4)


def chunked_delta(rng: Random, *, spec: DeltaSpec, lengths: Sequence[int], longest: int) -> Trial:
    return delta_net(rng, spec=spec, steps=in_chunks(rng, *lengths, longest=longest), tokens=max(lengths))


DELTA_CASES = (
    Case("sigmoid_mul", "each value", "F32", FLOAT, partial(sigmoid_mul, width=33, gates=33)),
    Case("sigmoid_mul", "each row", "F32", FLOAT, partial(sigmoid_mul, width=48, gates=1)),
    Case("delta_net", "one token", "F32", FLOAT, partial(chunked_delta, spec=DELTA, lengths=(1,), longest=1)),
    Case("delta_net", "whole prompt", "F32", FLOAT, partial(chunked_delta, spec=LONG, lengths=(70,), longest=999)),
    Case("delta_net", "large heads", "F32", FLOAT, partial(chunked_delta, spec=LARGE, lengths=(5,), longest=3)),
    Case("delta_net", "token by token", "F32", FLOAT, partial(chunked_delta, spec=DELTA, lengths=(6, 3), longest=1)),
    Case("delta_net", "tiled", "F32", FLOAT, partial(chunked_delta, spec=TILED, lengths=(9, 1, 14), longest=6)),
    Case("delta_net", "odd widths", "F32", FLOAT, partial(chunked_delta, spec=ODD, lengths=(5, 9), longest=4)),
    Case("delta_net", "states", "F32", FLOAT, partial(delta_net, spec=DELTA, steps=saved_and_begun(), tokens=50)),
)

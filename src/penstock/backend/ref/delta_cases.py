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
from penstock.model.ops import DeltaInputs, DeltaWeights, Ops
from penstock.model.random_tensor import random_tensor
from penstock.model.recurrence import DeltaSpec
from penstock.model.tensor import Stack


def sigmoid_mul(rng: Random, *, width: int, gates: int) -> Trial:
    weight = Stack([random_tensor(rng, "F32", gates, width)], [None])
    return Trial(
        lambda ops, table, weight: ops.sigmoid_mul(ops.embed(table), ops.linear(ops.embed(table), weight)),
        [inputs(rng, 9, width), weight],
        all_at_once(9),
    )


def delta_net(
    rng: Random, *, spec: DeltaSpec, steps: Sequence[Batch], tokens: int, apart: bool = False, rate: float = -3
) -> Trial:
    """Returns a trial whose states decay slowly, so that all earlier tokens count, or with another `rate` by about
    e^-(e^rate) per token. With `apart`, each input is a value of its own; else two are made together."""

    def forward(ops: Ops[Any], table: Any, *weights: Any) -> Any:
        x, products = ops.embed(table), len(weights) - len(DeltaWeights._fields)
        gates = [ops.linear(x, weight) for weight in weights[:products]]
        made = DeltaInputs(x, *gates) if apart else DeltaInputs(x, x, *gates * 2)
        return ops.delta_net(0, made, DeltaWeights(*weights[products:]), spec, 1e-5)

    width = spec.width if apart else spec.width + spec.v_width
    rows = (spec.v_width, spec.v_heads, spec.decay_width) if apart else (spec.v_heads + spec.decay_width,)
    gates = [Stack([random_tensor(rng, "F32", count, width)], [None]) for count in rows]
    for gate in gates:
        gate.parts[0].data.view(np.float32)[:] *= width**-0.5
    sizes = spec.width * spec.conv_width, spec.v_heads, spec.decay_width, spec.v_dim
    conv, decay, dt_bias, gain = (random_tensor(rng, "F32", size) for size in sizes)
    decay.data.view(np.float32)[:] = -np.exp(rng.normal(rate, 1, spec.v_heads))
    return Trial(forward, [inputs(rng, tokens, width), *gates, conv, decay, dt_bias, gain], steps, 1, states=8)


def in_chunks(rng: Random, *lengths: int, longest: int) -> list[Batch]:
    prompts = [range(length) for length in lengths]
    return [greedy_batch(chunks, i) for i, chunks in enumerate(random_steps(rng, prompts, BLOCK_SIZE, longest))]


def saved_and_begun() -> list[Batch]:
    """Returns steps in which a state is saved in the middle of a row and at its end; others continue from there in
    other slots, and its own slot begins anew."""
    first = greedy_batch([Chunk(range(9), 0, [0], 0), Chunk(range(20, 22), 0, [0], 3)])
    then = greedy_batch([Chunk(range(30, 35), 5, [0], 1), Chunk(range(2), 0, [0], 0), Chunk(range(4), 2, [0], 3)], 1)
    last = greedy_batch([Chunk(range(40, 44), 8, [0], 2), Chunk(range(2, 6), 2, [0], 0), Chunk([7], 10, [0], 1)], 2)
    return [
        replace(first, moves=(StateMove(0, -1, 6, 5), StateMove(1, -1, 5, 2))),
        replace(then, moves=(StateMove(0, 6, 7, 3), StateMove(2, 5, -1, 0))),
        replace(last, moves=(StateMove(0, 7, -1, 0), StateMove(1, -1, 4, 4))),
    ]


def saved_far() -> list[Batch]:
    """Returns steps in which a state is saved far into a row, and another row continues from there, and saves its
    own."""
    blocks = [0] * 5
    first = greedy_batch([Chunk(range(41), 0, blocks, 0), Chunk(range(50, 66), 0, blocks, 3)])
    then = greedy_batch([Chunk(range(30, 70), 37, blocks, 1), Chunk([7], 41, blocks, 0)], 1)
    return [
        replace(first, moves=(StateMove(0, -1, 6, 37), StateMove(1, -1, 5, 16))),
        replace(then, moves=(StateMove(0, 6, 7, 30),)),
    ]


DELTA = DeltaSpec(2, 4, 16, 16, 4)
TILED = DeltaSpec(2, 6, 16, 48, 4, tiled=True)
ODD = DeltaSpec(3, 3, 5, 21, 2)
LARGE = DeltaSpec(1, 1, 128, 128, 4)
LONG = DeltaSpec(1, 1, 32, 16, 4)
GATED = DeltaSpec(2, 4, 16, 16, 4, gate="sigmoid")
CHANNELS = DeltaSpec(2, 2, 16, 16, 4, channel_decay=True, gate="sigmoid")
ODD_CHANNELS = DeltaSpec(2, 4, 7, 21, 3, tiled=True, channel_decay=True)


def chunked_delta(rng: Random, *, lengths: Sequence[int], longest: int, **about: Any) -> Trial:
    return delta_net(rng, steps=in_chunks(rng, *lengths, longest=longest), tokens=max(lengths), **about)


by_channel = partial(chunked_delta, apart=True)


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
    Case("delta_net", "sigmoid gate", "F32", FLOAT, partial(chunked_delta, spec=GATED, lengths=(9,), longest=4)),
    Case("delta_net", "by channel", "F32", FLOAT, partial(by_channel, spec=CHANNELS, lengths=(1, 70), longest=40)),
    Case("delta_net", "large prompts", "F32", FLOAT, partial(chunked_delta, spec=LARGE, lengths=(70,), longest=999)),
    Case("delta_net", "forgets", "F32", FLOAT, partial(chunked_delta, spec=LONG, lengths=(70,), longest=999, rate=4)),
    Case("delta_net", "keeps", "F32", FLOAT, partial(chunked_delta, spec=LONG, lengths=(70,), longest=999, rate=-12)),
    Case("delta_net", "states of prompts", "F32", FLOAT, partial(delta_net, spec=DELTA, steps=saved_far(), tokens=70)),
    Case(
        *("delta_net", "channels of prompts", "F32", FLOAT),
        partial(delta_net, spec=CHANNELS, steps=saved_far(), tokens=70, apart=True, rate=1),
    ),
    Case("delta_net", "odd channels", "F32", FLOAT, partial(by_channel, spec=ODD_CHANNELS, lengths=(9,), longest=4)),
    Case(
        *("delta_net", "states by channel", "F32", FLOAT),
        partial(delta_net, spec=CHANNELS, steps=saved_and_begun(), tokens=50, apart=True),
    ),
)

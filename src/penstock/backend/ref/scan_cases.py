"""Makes inputs of causal convolutions and of selective scans (see cases.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.backend.base import Batch
from penstock.backend.ref.cases import FLOAT, Case, Random, Trial, inputs
from penstock.backend.ref.delta_cases import in_chunks, saved_and_begun
from penstock.model.ops import ConvWeights, Ops, ScanWeights
from penstock.model.random_tensor import random_tensor
from penstock.model.recurrence import ConvSpec, ScanSpec
from penstock.model.tensor import Stack

TOKENS = 50


def causal_conv(rng: Random, *, spec: ConvSpec, columns: int, biased: bool, steps: Sequence[Batch]) -> Trial:

    def forward(ops: Ops[Any], table: Any, conv: Any, *bias: Any) -> Any:
        return ops.causal_conv(0, ops.embed(table), ConvWeights(conv, bias[0] if bias else None), spec)

    vectors = [random_tensor(rng, "F32", spec.width * spec.conv_width)]
    vectors += [random_tensor(rng, "F32", spec.width)] if biased else []
    return Trial(forward, [inputs(rng, TOKENS, columns), *vectors], steps, 1, states=8)


def selective_scan(rng: Random, *, spec: ScanSpec, steps: Sequence[Batch]) -> Trial:
    """Returns a trial whose states decay slowly, so that all earlier tokens count. All inputs are projected from
    embeddings as wide as the channels."""

    def forward(ops: Ops[Any], table: Any, *weights: Any) -> Any:
        x = ops.embed(table)
        dt, b, c, gate = (ops.linear(x, weight) for weight in weights[:4])
        return ops.selective_scan(0, x, dt, b, c, gate, ScanWeights(*weights[4:]), spec)

    rows = spec.width, spec.state_size, spec.state_size, 2 * spec.width
    matrices = [Stack([random_tensor(rng, "F32", count, spec.width)], [None]) for count in rows]
    for matrix in matrices:
        matrix.parts[0].data.view(np.float32)[:] *= spec.width**-0.5
    decay, skip = random_tensor(rng, "F32", spec.state_floats), random_tensor(rng, "F32", spec.width)
    decay.data.view(np.float32)[:] = -np.exp(rng.normal(-3, 1, spec.state_floats))
    return Trial(forward, [inputs(rng, TOKENS, spec.width), *matrices, decay, skip], steps, 1, states=8)


def chunked_conv(rng: Random, *, spec: ConvSpec, columns: int, biased: bool, longest: int) -> Trial:
    steps = in_chunks(rng, 9, 1, 14, longest=longest)
    return causal_conv(rng, spec=spec, columns=columns, biased=biased, steps=steps)


def chunked_scan(rng: Random, *, spec: ScanSpec, lengths: Sequence[int], longest: int) -> Trial:
    return selective_scan(rng, spec=spec, steps=in_chunks(rng, *lengths, longest=longest))


CONV = ConvSpec(40, 4)
GATED = ConvSpec(33, 3, gated=True)
WIDE = ConvSpec(300, 2, gated=True)
SCAN = ScanSpec(96, 16)
ODD = ScanSpec(21, 5)
LARGE = ScanSpec(16, 64)

SCAN_CASES = (
    Case("causal_conv", "biased", "F32", FLOAT, partial(chunked_conv, spec=CONV, columns=80, biased=True, longest=6)),
    Case("causal_conv", "gated", "F32", FLOAT, partial(chunked_conv, spec=GATED, columns=99, biased=False, longest=1)),
    Case("causal_conv", "wide", "F32", FLOAT, partial(chunked_conv, spec=WIDE, columns=900, biased=True, longest=99)),
    Case(
        *("causal_conv", "states", "F32", FLOAT),
        partial(causal_conv, spec=GATED, columns=99, biased=False, steps=saved_and_begun()),
    ),
    Case("selective_scan", "one token", "F32", FLOAT, partial(chunked_scan, spec=SCAN, lengths=(1,), longest=1)),
    Case("selective_scan", "chunks", "F32", FLOAT, partial(chunked_scan, spec=SCAN, lengths=(19, 1, 7), longest=6)),
    Case("selective_scan", "odd widths", "F32", FLOAT, partial(chunked_scan, spec=ODD, lengths=(5, 9), longest=99)),
    Case("selective_scan", "large states", "F32", FLOAT, partial(chunked_scan, spec=LARGE, lengths=(6, 3), longest=1)),
    Case("selective_scan", "states", "F32", FLOAT, partial(selective_scan, spec=SCAN, steps=saved_and_begun())),
)

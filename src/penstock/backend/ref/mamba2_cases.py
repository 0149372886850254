"""Makes inputs of Mamba2 (see cases.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.backend.base import Batch
from penstock.backend.ref.cases import FLOAT, Case, Random, Trial, inputs
from penstock.backend.ref.delta_cases import in_chunks, saved_and_begun, saved_far
from penstock.model.ops import Mamba2Weights, Ops
from penstock.model.random_tensor import random_tensor
from penstock.model.recurrence import Mamba2Spec


def mamba2(rng: Random, *, spec: Mamba2Spec, steps: Sequence[Batch], tokens: int, biased: bool = True) -> Trial:
    """Returns a trial whose states decay slowly, so that all earlier tokens count. Without norm groups it has no
    gain."""

    def forward(ops: Ops[Any], table: Any, conv: Any, decay: Any, dt_bias: Any, skip: Any, *others: Any) -> Any:
        left = list(others)
        conv_bias, gain = left.pop(0) if biased else None, left.pop(0) if spec.norm_groups else None
        weights = Mamba2Weights(conv, conv_bias, decay, dt_bias, skip, gain)
        return ops.mamba2(0, ops.embed(table), weights, spec)

    sizes = [spec.width * spec.conv_width, spec.heads, spec.heads, spec.heads]
    sizes += [spec.width] * biased + [spec.inner] * bool(spec.norm_groups)
    vectors = [random_tensor(rng, "F32", size) for size in sizes]
    vectors[1].data.view(np.float32)[:] = -np.exp(rng.normal(-3, 1, spec.heads))
    return Trial(forward, [inputs(rng, tokens, spec.in_width), *vectors], steps, 1, states=8)


def chunked(rng: Random, *, spec: Mamba2Spec, lengths: Sequence[int], longest: int, biased: bool = True) -> Trial:
    steps = in_chunks(rng, *lengths, longest=longest)
    return mamba2(rng, spec=spec, steps=steps, tokens=max(lengths), biased=biased)


MAMBA2 = Mamba2Spec(4, 16, 16, 2, 4, norm_groups=2)
ODD = Mamba2Spec(3, 21, 5, 1, 2, norm_groups=3, z_scale=0.7, dt_scale=1.5, dt_min=0.1, dt_max=0.9)
PLAIN = Mamba2Spec(6, 48, 32, 3, 4, norm_groups=0)
LARGE = Mamba2Spec(2, 64, 128, 1, 4)
LONG = Mamba2Spec(1, 32, 16, 1, 4)

MAMBA2_CASES = (
    Case("mamba2", "one token", "F32", FLOAT, partial(chunked, spec=MAMBA2, lengths=(1,), longest=1)),
    Case("mamba2", "whole prompt", "F32", FLOAT, partial(chunked, spec=LONG, lengths=(70,), longest=999)),
    Case("mamba2", "large heads", "F32", FLOAT, partial(chunked, spec=LARGE, lengths=(5,), longest=3)),
    Case("mamba2", "token by token", "F32", FLOAT, partial(chunked, spec=MAMBA2, lengths=(6, 3), longest=1)),
    Case("mamba2", "states of prompts", "F32", FLOAT, partial(mamba2, spec=MAMBA2, steps=saved_far(), tokens=70)),
    Case("mamba2", "no norm", "F32", FLOAT, partial(chunked, spec=PLAIN, lengths=(9, 1, 14), longest=6)),
    Case("mamba2", "odd widths", "F32", FLOAT, partial(chunked, spec=ODD, lengths=(5, 9), longest=4, biased=False)),
    Case("mamba2", "odd prompts", "F32", FLOAT, partial(chunked, spec=ODD, lengths=(45, 3), longest=40)),
    Case("mamba2", "states", "F32", FLOAT, partial(mamba2, spec=MAMBA2, steps=saved_and_begun(), tokens=50)),
)

"""Defines what one token does to the states of Mamba2, in float32 NumPy (see ops.py)."""

from __future__ import annotations

import numpy as np

from penstock.backend.base import Floats
from penstock.model.ops import Mamba2Weights
from penstock.model.recurrence import Mamba2Spec


def time_steps(dt: Floats, weights: Mamba2Weights, spec: Mamba2Spec) -> Floats:
    steps = np.logaddexp(np.float32(0), dt * np.float32(spec.dt_scale) + weights.dt_bias)
    clamped: Floats = np.clip(steps, np.float32(spec.dt_min), np.float32(spec.dt_max))
    return clamped


def selective_scan(
    state: Floats, mixed: Floats, dt: Floats, weights: Mamba2Weights, spec: Mamba2Spec
) -> tuple[Floats, Floats]:
    """Returns the heads' states after one token, and its output: [heads, state_dim, head_dim], [heads,
    head_dim]."""
    x, b, c = np.split(mixed, [spec.inner, spec.inner + spec.groups * spec.state_dim])
    x = x.reshape(spec.heads, spec.head_dim)
    b, c = (np.repeat(each.reshape(spec.groups, spec.state_dim), spec.heads // spec.groups, axis=0) for each in (b, c))
    state = state * np.exp(weights.decay * dt)[:, None, None] + b[:, :, None] * (x * dt[:, None])[:, None, :]
    return state, np.einsum("hs,hsd->hd", c, state) + weights.skip[:, None] * x

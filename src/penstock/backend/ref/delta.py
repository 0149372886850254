"""Defines what one token does to the states of a gated delta net, in float32 NumPy (see ops.py)."""

from __future__ import annotations

import numpy as np

from penstock.backend.base import Floats
from penstock.model.ops import DeltaWeights
from penstock.model.recurrence import DeltaSpec


def delta_rule(
    state: Floats, mixed: Floats, learned: Floats, alpha: Floats, weights: DeltaWeights, spec: DeltaSpec
) -> tuple[Floats, Floats]:
    """Returns the heads' states after one token, and its output: [v_heads, k_dim, v_dim], [v_heads,
    v_dim]. `learned` is the share of the difference to its value that each state takes in."""
    q, k, v = np.split(mixed, [spec.k_width, 2 * spec.k_width])
    q, k = (each_value_head(unit(x.reshape(spec.k_heads, spec.k_dim)), spec) for x in (q, k))  # [v_heads, k_dim]
    gates = np.logaddexp(np.float32(0), alpha + weights.dt_bias).reshape(spec.v_heads, -1)  # one, or one for each row
    state = state * np.exp(weights.decay[:, None] * gates)[:, :, None]
    known = np.einsum("hk,hkv->hv", k, state)
    update = learned[:, None] * (v.reshape(spec.v_heads, spec.v_dim) - known)
    state = state + k[:, :, None] * update[:, None, :]
    return state, np.einsum("hk,hkv->hv", q * np.float32(spec.k_dim**-0.5), state)


def each_value_head(x: Floats, spec: DeltaSpec) -> Floats:
    """Returns the key head of each value head: [k_heads, k_dim] -> [v_heads, k_dim]."""
    shared = spec.v_heads // spec.k_heads
    return np.tile(x, (shared, 1)) if spec.tiled else np.repeat(x, shared, axis=0)


def unit(x: Floats) -> Floats:
    y: Floats = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(1e-6))
    return y

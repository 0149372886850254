"""Defines the ops that cut rows into columns and residual streams, in float32 NumPy."""

from __future__ import annotations

from math import isqrt

import numpy as np

from penstock.backend.base import Floats
from penstock.backend.ref.activations import ACTS

LEAST_SQUARE = np.float32(1e-5)  # mean square of a scaled stream, at least


def split(x: Floats, dims: int) -> Floats:
    return x.reshape(len(x), x.shape[1] // dims, dims)


class RefStreamOps:
    """Computes those ops of model/ops.py that know nothing of a step: a value is an array."""

    __slots__ = ()

    def take_columns(self, x: Floats, first: int, width: int, gain: Floats | None = None) -> Floats:
        taken = x[:, first : first + width]
        return taken if gain is None else taken * gain

    def concat(self, x: Floats, y: Floats) -> Floats:
        return np.concatenate([x, y], axis=1)

    def match_rms(self, x: Floats, like: Floats) -> Floats:
        runs = split(x, like.shape[1])
        squares = np.maximum(np.mean(runs * runs, axis=2, keepdims=True), LEAST_SQUARE)
        wanted = np.mean(like * like, axis=1)[:, None, None]
        scaled: Floats = (runs * np.sqrt(wanted / squares)).reshape(x.shape)
        return scaled

    def mix_streams(self, x: Floats, coefficients: Floats) -> Floats:
        count = isqrt(coefficients.shape[1])
        mixed = np.einsum("tji,tid->tjd", coefficients.reshape(len(x), count, count), split(x, x.shape[1] // count))
        y: Floats = x + mixed.reshape(x.shape)
        return y

    def correct_streams(self, x: Floats, new: Floats, coefficients: Floats, active: int) -> Floats:
        streams = split(x, new.shape[1])
        moved = (1 + coefficients)[:, :, None] * (new - streams[:, active])[:, None, :]
        return (streams + moved).reshape(x.shape)

    def add_to_streams(self, x: Floats, y: Floats) -> Floats:
        first, others = np.split(x, [y.shape[1]], axis=1)
        return np.concatenate([first, others + np.tile(y, others.shape[1] // y.shape[1])], axis=1)

    def sparse_act_and_mul(self, x: Floats, act: str, cutoff: float) -> Floats:
        left, right = np.split(x, 2, axis=-1)
        lowest = left.mean(axis=1, keepdims=True) + np.float32(cutoff) * left.std(axis=1, keepdims=True)
        return ACTS[act](np.maximum(left - lowest, 0)) * right

    def activate(self, x: Floats, act: str) -> Floats:
        return ACTS[act](x)

    def gate_columns(self, x: Floats, y: Floats, first: int, act: str) -> Floats:
        return ACTS[act](x) * y[:, first : first + x.shape[1]]

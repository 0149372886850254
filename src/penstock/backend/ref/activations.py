"""Defines the activations of the op vocabulary, in float32 NumPy."""

from __future__ import annotations

from math import erfc

import numpy as np

from penstock.backend.base import Floats


def sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        y: Floats = np.reciprocal(1 + np.exp(-x))
    return y


def clamped(left: Floats, right: Floats) -> Floats:
    low = np.minimum(left, np.float32(7))
    y: Floats = low * sigmoid(np.float32(1.702) * low) * (1 + np.clip(right, np.float32(-7), np.float32(7)))
    return y


def silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp overflows only if the answer is 0
        y: Floats = x / (1 + np.exp(-x))
    return y


def gelu_tanh(x: Floats) -> Floats:
    y: Floats = x / 2 * (1 + np.tanh(np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)))
    return y


def gelu(x: Floats) -> Floats:
    below = np.array([erfc(-one / 2**0.5) / 2 for one in x.ravel().tolist()])  # how much of a normal distribution is
    y: Floats = x * below.reshape(x.shape).astype(np.float32)
    return y


def relu(x: Floats) -> Floats:
    return np.maximum(x, 0)


def identity(x: Floats) -> Floats:
    return x


def relu2(x: Floats) -> Floats:
    return np.square(relu(x))


ACTS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "relu2": relu2}

"""Defines the values of FP8 codes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.model.tensor import Scales

Floats = NDArray[np.float32]


def table(exponent_bits: int, mantissa_bits: int) -> Floats:
    code = np.arange(256)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    power = np.maximum(exponent, 1) - (1 << exponent_bits - 1) + 1 - mantissa_bits
    values: Floats = np.ldexp(np.where(code > 127, -1.0, 1.0) * significand, power).astype(np.float32)
    return values


def e4m3() -> Floats:
    """Returns the values of e4m3, which has no infinities: only the last code of each sign is NaN."""
    values = table(4, 3)
    values[[0x7F, 0xFF]] = np.nan
    return values


def e5m2() -> Floats:
    values = table(5, 2)
    values[[0x7C, 0xFC]] = np.inf, -np.inf
    values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


TABLES = {"F8_E4M3": e4m3(), "F8_E5M2": e5m2()}


def fp8_values(data: NDArray[np.uint8], format_name: str, shape: tuple[int, ...], scales: Scales | None) -> Floats:
    values = TABLES[format_name][data].reshape(shape)
    return values if scales is None else values * expand_scales(scales, shape)


def expand_scales(scales: Scales, shape: tuple[int, ...]) -> Floats:
    """Returns a scale for each value of a matrix: [rows, columns]."""
    rows, columns = shape
    down, across = np.arange(rows) // scales.rows, np.arange(columns) // scales.columns
    return scales.values[down[:, None], across]

"""Converts GGUF's Q1_0 and Q2_0, codes of one or two bits with a float16 scale per run, to Q4_0.

    Q1_0: value = d * (2 * code - 1)
    Q2_0: value = d * (code - 1)

Q4_0 holds these values exactly, and every backend has kernels for it.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from penstock.model.formats.grouped import Array, Factors, Grouped, unpack
from penstock.model.tensor import Tensor

BITS = {"Q1_0": 1, "Q2_0": 2}


def as_q4_0(tensor: Tensor) -> Tensor:
    name, run, size = tensor.format
    *outer, width = tensor.shape
    rows, bits = prod(outer), BITS[name]
    blocks = tensor.data.reshape(rows, width // run, size)

    def codes(first: int, last: int) -> NDArray[np.uint8]:
        packed = np.ascontiguousarray(blocks[first:last, :, 2:]).reshape(last - first, -1)
        return unpack(packed, bits) * np.uint8(3 - bits)  # a sign bit counts twice

    def factors(first: int, last: int) -> Factors:
        scales: Array = np.ascontiguousarray(blocks[first:last, :, :2]).view("<f2")[..., 0]
        return Factors(scales.astype(np.float32), np.int16(1))

    whole = Grouped(tensor.name, name, (rows, width), 2, run, codes, factors).tensor()
    return replace(whole, shape=tensor.shape)

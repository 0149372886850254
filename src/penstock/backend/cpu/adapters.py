"""Keeps adapters for native products: thin matrices in the same panels as other weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.backend.base import Floats
from penstock.backend.cpu._native import Adapter, Program, Weight, quantize
from penstock.backend.cpu.weights import BLOCK
from penstock.model.low_rank import LowRankUpdate
from penstock.model.tensor import FORMATS

F16_MOST = 65504.0  # the largest number that F16 has


class NativeAdapters:
    """Keeps adapters in slots of a native program: see AdapterSlots. Matrices are F32 for F32 weights, else F16.
    For quantized weights, whose products take quantized activations, the first of two is Q8_0."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def pack(self, updates: Sequence[LowRankUpdate]) -> Adapter:
        packed = Adapter()
        for update in updates:
            weight, values = update.weight, np.concatenate([part.a for part in update.parts])
            quantized = weight.coded and weight.width % BLOCK == 0
            a = quantized_matrix(values) if quantized else thin_matrix(values, weight.precise)
            packed.add(weight, a, [(part.first, thin_matrix(part.b, weight.precise)) for part in update.parts])
        return packed

    def load(self, slot: int, packed: Adapter) -> None:
        self.program.load_adapter(slot, packed)

    def drop(self, slot: int) -> None:
        self.program.drop_adapter(slot)


def quantized_matrix(values: Floats) -> Weight:
    rows, width = values.shape
    codes = np.empty(values.size // BLOCK * FORMATS["Q8_0"].bytes, np.uint8)
    quantize("F32", np.ascontiguousarray(values).reshape(-1).view(np.uint8), "Q8_0", codes, threads=1)
    weight = Weight(width, [("Q8_0", rows)])
    weight.fill(0, 0, rows, codes)
    return weight


def thin_matrix(values: Floats, precise: bool) -> Weight:
    """Packs a matrix as F16, or as F32 where that is asked for or a value is beyond F16."""
    if precise or max(values.max(), -values.min()) > F16_MOST:
        return packed_as("F32", values)
    return packed_as("F16", values.astype(np.float16))


def packed_as(format: str, values: Floats | np.ndarray[tuple[int, int], np.dtype[np.float16]]) -> Weight:
    """Packs a matrix whose values have the type of this format already."""
    rows, width = values.shape
    weight = Weight(width, [(format, rows)])
    weight.fill(0, 0, rows, np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    return weight

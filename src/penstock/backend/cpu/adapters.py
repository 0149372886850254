"""Keeps adapters for native products: thin matrices in the same panels as other weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.backend.base import Floats
from penstock.backend.cpu._native import Adapter, Program, Weight
from penstock.model.low_rank import LowRankUpdate


class NativeAdapters:
    """Keeps adapters in slots of a native program: see AdapterSlots. Matrices are F16, and F32 beside F32 weights, so
    that neither is the less precise of the two."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def check(self) -> None: ...

    def pack(self, updates: Sequence[LowRankUpdate]) -> Adapter:
        packed = Adapter()
        for update in updates:
            precise = update.weight.precise
            a = thin_matrix(np.concatenate([part.a for part in update.parts]), precise)
            packed.add(update.weight, a, [(part.first, thin_matrix(part.b, precise)) for part in update.parts])
        return packed

    def load(self, slot: int, packed: Adapter) -> None:
        self._program.load_adapter(slot, packed)

    def drop(self, slot: int) -> None:
        self._program.drop_adapter(slot)


def thin_matrix(values: Floats, precise: bool) -> Weight:
    """Packs a matrix as F16, or as F32 where that is asked for or a value is beyond F16."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if precise or not np.isfinite(halves).all():
        return packed_as("F32", values)
    return packed_as("F16", halves)


def packed_as(format: str, values: Floats | np.ndarray[tuple[int, int], np.dtype[np.float16]]) -> Weight:
    """Packs a matrix whose values have the type of this format already."""
    rows, width = values.shape
    weight = Weight(width, [(format, rows)])
    weight.fill(0, 0, rows, np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    return weight

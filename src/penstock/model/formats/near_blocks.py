"""Converts matrices whose factors are not exact in float16 to storage blocks, if that is more accurate than 16-bit
values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from penstock.model.dequantize import LAYOUTS
from penstock.model.tensor import FORMATS, STORAGE, Bytes, Tensor

BLOCK = 32
MAX_ERROR = 2**-11  # relative error of a float16 scale


@dataclass(frozen=True, slots=True)
class NearBlocks:
    """Produces a tensor's rows exactly, or as storage blocks with float16 factors."""

    values: Callable[[int, int], Bytes]
    blocks: Callable[[int, int], Bytes]
    format: str  # block format

    def __call__(self, first: int, last: int) -> Bytes:
        return self.values(first, last)


def as_near_blocks(tensor: Tensor) -> Tensor | None:
    """Returns the tensor in storage blocks with float16 factors; None if there is no such format, or if 16-bit values
    would be more accurate.
    """
    if isinstance(tensor.source, NearBlocks):
        return replace(tensor, format=STORAGE[tensor.source.format], source=tensor.source.blocks)
    if tensor.format.name != "I8" or tensor.scales is None or tensor.shape[-1] % BLOCK:
        return None
    with np.errstate(over="ignore"):
        off = np.abs(tensor.scales.values.astype(np.float16) - tensor.scales.values)
    if not (off <= MAX_ERROR * np.abs(tensor.scales.values)).all():
        return None
    return replace(tensor, format=FORMATS["Q8_0"], source=partial(q8_0_blocks, tensor), scales=None)


def q8_0_blocks(tensor: Tensor, first: int, last: int) -> Bytes:
    """Returns rows `first` to `last` as Q8_0 blocks."""
    assert tensor.scales is not None
    out = np.empty((last - first, tensor.shape[1] // BLOCK), LAYOUTS["Q8_0"])
    out["d"] = tensor.scales.values[np.arange(first, last) // tensor.scales.rows]
    out["qs"] = tensor.data.view(np.int8).reshape(tensor.shape)[first:last].reshape(*out.shape, BLOCK)
    return out.reshape(-1).view(np.uint8)

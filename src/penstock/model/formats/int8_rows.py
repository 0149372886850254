"""Turns 8-bit codes with a float32 scale for each row into storage blocks that kernels know."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from penstock.model.dequantize import LAYOUTS
from penstock.model.tensor import FORMATS, Bytes, Tensor

BLOCK = 32
MAX_ERROR = 2**-11  # relative, of a scale in float16


def as_q8_0(tensor: Tensor) -> Tensor | None:
    """Returns the tensor as Q8_0 with scales rounded to float16, which is more exact than values of 16 bits would be.
    Returns None if the tensor is no such matrix, or if float16 cannot hold its scales that exactly."""
    if tensor.format.name != "I8" or tensor.scales is None or tensor.shape[-1] % BLOCK:
        return None
    with np.errstate(over="ignore"):
        off = np.abs(tensor.scales.values.astype(np.float16) - tensor.scales.values)
    if not (off <= MAX_ERROR * np.abs(tensor.scales.values)).all():
        return None
    return replace(tensor, format=FORMATS["Q8_0"], source=partial(blocks, tensor), scales=None)


def blocks(tensor: Tensor, first: int, last: int) -> Bytes:
    """Returns rows `first` to `last` as Q8_0 blocks."""
    assert tensor.scales is not None
    out = np.empty((last - first, tensor.shape[1] // BLOCK), LAYOUTS["Q8_0"])
    out["d"] = tensor.scales.values[np.arange(first, last) // tensor.scales.rows]
    out["qs"] = tensor.data.view(np.int8).reshape(tensor.shape)[first:last].reshape(*out.shape, BLOCK)
    return out.reshape(-1).view(np.uint8)

"""Bytes with a float32 scale for each row, as blocks that kernels know."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from penstock.model.dequantize import LAYOUTS
from penstock.model.tensor import FORMATS, Bytes, Tensor

BLOCK = 32
NEAR = 2**-11


def as_q8_0(tensor: Tensor) -> Tensor | None:
    """With scales rounded to float16, which are nearer than values rounded to 16 bits; None where they are not."""
    if tensor.format.name != "I8" or tensor.scales is None or tensor.shape[-1] % BLOCK:
        return None
    with np.errstate(over="ignore"):
        off = np.abs(tensor.scales.values.astype(np.float16) - tensor.scales.values)
    if not (off <= NEAR * np.abs(tensor.scales.values)).all():
        return None
    return replace(tensor, format=FORMATS["Q8_0"], source=partial(blocks, tensor), scales=None)


def blocks(tensor: Tensor, first: int, last: int) -> Bytes:
    assert tensor.scales is not None
    out = np.empty((last - first, tensor.shape[1] // BLOCK), LAYOUTS["Q8_0"])
    out["d"] = tensor.scales.values[np.arange(first, last) // tensor.scales.rows]
    out["qs"] = tensor.data.view(np.int8).reshape(tensor.shape)[first:last].reshape(*out.shape, BLOCK)
    return out.reshape(-1).view(np.uint8)

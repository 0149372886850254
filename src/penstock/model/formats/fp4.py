"""Floats of 4 bits, two of them in a byte, with scales of 32 or 16 of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile
from penstock.model.dequantize import FP4_VALUES, LAYOUTS
from penstock.model.formats.bits import fields
from penstock.model.formats.fp8 import TABLES
from penstock.model.formats.grouped import BLOCK, Floats
from penstock.model.formats.modules import check_shape, integers, sizes_of
from penstock.model.tensor import FORMATS, Bytes, Format, Scales, Tensor

NVFP4_GROUP, NVFP4_BLOCK = 16, 64
NO_NUMBER = 0x7F


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Scales are powers of two: as GGUF's MXFP4, but for the order of the codes."""
    rows, half = sizes_of(packed)
    width = 2 * half
    check_shape(scale, (rows, width // BLOCK))
    stored, powers = integers(packed, "U8"), integers(scale, "U8", "F8_E8M0")

    def make(first: int, last: int) -> Bytes:
        out = np.empty((last - first, width // BLOCK), LAYOUTS["MXFP4"])
        codes = fields(stored[first:last], 4).reshape(*out.shape, BLOCK)
        out["e"] = powers[first:last]
        out["qs"] = codes[..., :16] | codes[..., 16:] << 4
        return out.reshape(-1).view(np.uint8)

    return Tensor(packed.name, FORMATS["MXFP4"], (rows, width), make)


def nvfp4(packed: Tensor, scale: Tensor, whole: Floats) -> Tensor:
    """Scales are float8, and one float32 multiplies them all: as GGUF's NVFP4, but for the order of the codes."""
    rows, half = sizes_of(packed)
    width = 2 * half
    check_shape(scale, (rows, width // NVFP4_GROUP))
    if scale.format.name != "F8_E4M3" or whole.size != 1:
        raise MalformedFile(f"the scales of {packed.name!r} must be F8_E4M3, with one number for all of them")
    stored, scales = integers(packed, "U8"), scale.data.reshape(scale.shape)
    outer = Scales(whole.reshape(1, 1), rows, width)
    if width % NVFP4_BLOCK or (scales >= NO_NUMBER).any():  # GGUF's blocks have no signs
        return Tensor(packed.name, Format("odd NVFP4", 1, 4), (rows, width), partial(values, stored, scales), outer)
    return Tensor(packed.name, FORMATS["NVFP4"], (rows, width), partial(blocks, stored, scales), outer)


def blocks(stored: NDArray[Any], scales: Bytes, first: int, last: int) -> Bytes:
    out = np.empty((last - first, 2 * stored.shape[1] // NVFP4_BLOCK), LAYOUTS["NVFP4"])
    codes = fields(stored[first:last], 4).reshape(*out.shape, 4, NVFP4_GROUP)
    out["scales"] = scales[first:last].reshape(*out.shape, 4)
    out["qs"] = codes[..., :8] | codes[..., 8:] << 4
    return out.reshape(-1).view(np.uint8)


def values(stored: NDArray[Any], scales: Bytes, first: int, last: int) -> Bytes:
    numbers = FP4_VALUES[fields(stored[first:last], 4)].reshape(last - first, -1, NVFP4_GROUP) / 2
    return (numbers * TABLES["F8_E4M3"][scales[first:last]][..., None]).reshape(-1).view(np.uint8)

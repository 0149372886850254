"""Floats of 4 bits, two of them in a byte, with scales of 32 or 16 of them."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile
from penstock.model.float8 import TABLES
from penstock.model.formats.bits import fields
from penstock.model.formats.grouped import BLOCK, Floats
from penstock.model.formats.modules import check_shape, integers, sizes_of
from penstock.model.quant import FP4_VALUES, LAYOUTS
from penstock.model.tensor import FORMATS, Bytes, Format, Scales, Tensor

NVFP4_GROUP = 16


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Scales are powers of two: as GGUF's MXFP4, but for the order of the codes."""
    rows, half = sizes_of(packed)
    width = 2 * half
    check_shape(scale, (rows, width // BLOCK))
    stored, powers = integers(packed, "U8"), integers(scale, "U8", "F8_E8M0")

    def blocks(first: int, last: int) -> Bytes:
        out = np.empty((last - first, width // BLOCK), LAYOUTS["MXFP4"])
        codes = fields(stored[first:last], 4).reshape(*out.shape, BLOCK)
        out["e"] = powers[first:last]
        out["qs"] = codes[..., :16] | codes[..., 16:] << 4
        return out.reshape(-1).view(np.uint8)

    return Tensor(packed.name, FORMATS["MXFP4"], (rows, width), blocks)


def nvfp4(packed: Tensor, scale: Tensor, whole: Floats) -> Tensor:
    """Scales are float8, and one float32 multiplies them all."""
    rows, half = sizes_of(packed)
    width = 2 * half
    check_shape(scale, (rows, width // NVFP4_GROUP))
    if scale.format.name != "F8_E4M3" or whole.size != 1:
        raise MalformedFile(f"the scales of {packed.name!r} must be F8_E4M3, with one number for all of them")
    stored = integers(packed, "U8")
    outer = Scales(whole.reshape(1, 1), rows, width)
    values = partial(nvfp4_values, stored, scale.data.reshape(scale.shape))
    return Tensor(packed.name, Format("NVFP4 of safetensors", 1, 4), (rows, width), values, outer)


def nvfp4_values(stored: NDArray[np.generic], scales: Bytes, first: int, last: int) -> Bytes:
    values = FP4_VALUES[fields(stored[first:last], 4)].reshape(last - first, -1, NVFP4_GROUP) / 2
    return (values * TABLES["F8_E4M3"][scales[first:last]][..., None]).reshape(-1).view(np.uint8)

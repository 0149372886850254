"""Converts 4-bit floats, two per byte with a scale for 32 or 16 of them, to storage blocks. 8-bit floats keep
their codes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MalformedFile
from penstock.model.dequantize import FP4_VALUES, LAYOUTS
from penstock.model.formats.fp8 import TABLES
from penstock.model.formats.grouped import BLOCK, Floats, unpack
from penstock.model.formats.modules import check_shape, integers, matrix_shape
from penstock.model.tensor import FORMATS, Bytes, Format, Scales, Tensor

NVFP4_GROUP, NVFP4_BLOCK = 16, 64
NAN = 0x7F  # in e4m3; larger codes are negative
E8M0_BIAS = 127  # codes above twice the bias are NaN


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Returns an MXFP4 weight, whose scales are powers of two. It differs from GGUF's only in code order."""
    rows, half = matrix_shape(packed)
    width = 2 * half
    check_shape(scale, (rows, width // BLOCK))
    stored, powers = integers(packed, "U8"), integers(scale, "U8", "F8_E8M0")

    def make(first: int, last: int) -> Bytes:
        out = np.empty((last - first, width // BLOCK), LAYOUTS["MXFP4"])
        codes = unpack(stored[first:last], 4).reshape(*out.shape, BLOCK)
        out["e"] = powers[first:last]
        out["qs"] = codes[..., :16] | codes[..., 16:] << 4
        return out.reshape(-1).view(np.uint8)

    return Tensor(packed.name, FORMATS["MXFP4"], (rows, width), make)


def mxfp8(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns an MXFP8 weight: F8_E4M3 with a power-of-two scale for each run of 32 columns."""
    rows, width = matrix_shape(codes)
    check_shape(scale, (rows, width // BLOCK))
    if codes.format.name != "F8_E4M3" or width % BLOCK:
        raise MalformedFile(f"tensor {codes.name!r} must be F8_E4M3, with rows of whole runs of {BLOCK} values")
    powers = integers(scale, "U8", "F8_E8M0").astype(np.int32) - E8M0_BIAS
    factors = np.where(powers > E8M0_BIAS, np.float32(np.nan), np.ldexp(np.float32(1), powers))
    return replace(codes, scales=Scales(factors.astype(np.float32), 1, BLOCK))


def nvfp4(packed: Tensor, scale: Tensor, whole: Floats) -> Tensor:
    """Returns an NVFP4 weight, with FP8 scales and one float32 scale. It differs from GGUF's only in code order."""
    rows, half = matrix_shape(packed)
    width = 2 * half
    check_shape(scale, (rows, width // NVFP4_GROUP))
    if scale.format.name != "F8_E4M3" or whole.size != 1:
        raise MalformedFile(f"the scales of {packed.name!r} must be F8_E4M3, with one float32 factor for all of them")
    stored, scales = integers(packed, "U8"), scale.data.reshape(scale.shape)
    outer = Scales(whole.reshape(1, 1), rows, width)
    if width % NVFP4_BLOCK or (scales >= NAN).any():  # GGUF's block scales are unsigned
        return Tensor(
            packed.name, Format("odd NVFP4", 1, 4), (rows, width), partial(nvfp4_values, stored, scales), outer
        )
    return Tensor(packed.name, FORMATS["NVFP4"], (rows, width), partial(nvfp4_blocks, stored, scales), outer)


def nvfp4_blocks(stored: NDArray[Any], scales: Bytes, first: int, last: int) -> Bytes:
    """Returns rows `first` to `last` as storage blocks."""
    out = np.empty((last - first, 2 * stored.shape[1] // NVFP4_BLOCK), LAYOUTS["NVFP4"])
    codes = unpack(stored[first:last], 4).reshape(*out.shape, 4, NVFP4_GROUP)
    out["scales"] = scales[first:last].reshape(*out.shape, 4)
    out["qs"] = codes[..., :8] | codes[..., 8:] << 4
    return out.reshape(-1).view(np.uint8)


def nvfp4_values(stored: NDArray[Any], scales: Bytes, first: int, last: int) -> Bytes:
    """Returns rows `first` to `last` as float32."""
    numbers = FP4_VALUES[unpack(stored[first:last], 4)].reshape(last - first, -1, NVFP4_GROUP) / 2
    return (numbers * TABLES["F8_E4M3"][scales[first:last]][..., None]).reshape(-1).view(np.uint8)

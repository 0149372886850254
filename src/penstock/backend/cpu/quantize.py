"""Quantizes on every thread, to the bit as model/quantize.py defines it."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from penstock.backend.cpu import _native
from penstock.model import quantize as definition
from penstock.model.dequantize import dequantize
from penstock.model.tensor import FORMATS, PLAIN, Format, Tensor


def quantize(tensor: Tensor, format: Format, threads: int) -> Tensor:
    if format == tensor.format:
        return tensor
    if format.values == 1:
        return definition.quantize(tensor, format)
    if tensor.format.name not in PLAIN:
        values = np.ascontiguousarray(dequantize(tensor), np.float32)
        tensor = replace(tensor, format=FORMATS["F32"], source=values.reshape(-1).view(np.uint8), scales=None)
    out = np.empty(prod(tensor.shape) // format.values * format.bytes, np.uint8)
    if not _native.quantize(tensor.format.name, tensor.data, format.name, out, threads):
        raise definition.not_finite(tensor)
    return replace(tensor, format=format, source=out)

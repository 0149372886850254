"""From a checkpoint's tensors to native packed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Floats
from penstock.backend.cpu._native import Weight
from penstock.model.quant import dequantize
from penstock.model.tensor import Tensor

NATIVE = frozenset(("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"))

# What has no kernel of its own is kept as Q8_0: half the memory of F16 and integer products, and its rounding (at most
# 1/254 of the largest of 32 values) is finer than that of any format it stands in for.
STAND_IN = "Q8_0"

STAND_IN_ROWS = 1024  # requantized at a time, so that a large matrix never lies in memory as floats


def pack_matrix(parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Weight:
    width = parts[0].shape[1]
    weight = Weight(width, [(native_format(part), part.shape[0]) for part in parts])
    for index, part in enumerate(parts):
        for row, rows, data in native_rows(part):
            weight.fill(index, row, rows, data)
    if any(bias):
        weight.set_bias(np.concatenate([bias_of(part, tensor) for part, tensor in zip(parts, bias, strict=True)]))
    return weight


def pack_vector(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(dequantize(tensor), dtype=np.float32)


def bias_of(part: Tensor, bias: Tensor | None) -> Floats:
    return np.zeros(part.shape[0], np.float32) if bias is None else pack_vector(bias)


def native_format(tensor: Tensor) -> str:
    return tensor.format.name if tensor.format.name in NATIVE else STAND_IN


def native_rows(tensor: Tensor) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
    """(first row, rows, bytes) in the tensor's native format, which together are the whole tensor."""
    rows, width = tensor.shape
    if tensor.format.name in NATIVE:
        yield 0, rows, tensor.data
        return
    row_bytes = width // tensor.format.values * tensor.format.bytes
    for row in range(0, rows, STAND_IN_ROWS):
        count = min(STAND_IN_ROWS, rows - row)
        data = tensor.data[row * row_bytes : (row + count) * row_bytes]
        yield row, count, to_q8_0(dequantize(Tensor(tensor.name, tensor.format, (count, width), data)))


def to_q8_0(values: Floats) -> NDArray[np.uint8]:
    blocks = values.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1) / 127).astype(np.float16)  # [b]
    inverse = np.divide(1, scale, out=np.zeros(len(scale), np.float32), where=scale > 0, dtype=np.float32)
    codes = np.clip(np.rint(blocks * inverse[:, None]), -127, 127).astype(np.int8)
    return np.concatenate([scale[:, None].view(np.uint8), codes.view(np.uint8)], axis=1).reshape(-1)

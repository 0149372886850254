"""From a checkpoint's tensors to native packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.backend.base import Floats
from penstock.backend.cpu._native import Weight
from penstock.model.quant import dequantize
from penstock.model.tensor import Tensor


def pack_matrix(parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Weight:
    weight = Weight(parts[0].shape[1], [(part.format.name, part.shape[0]) for part in parts])
    for index, part in enumerate(parts):
        weight.fill(index, 0, part.shape[0], part.data)
    if any(bias):
        weight.set_bias(np.concatenate([bias_of(part, tensor) for part, tensor in zip(parts, bias, strict=True)]))
    return weight


def pack_vector(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(dequantize(tensor), dtype=np.float32)


def bias_of(part: Tensor, bias: Tensor | None) -> Floats:
    return np.zeros(part.shape[0], np.float32) if bias is None else pack_vector(bias)

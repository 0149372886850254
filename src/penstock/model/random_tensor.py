"""Makes random weights in any format: machines are calibrated with them, and ops are tested."""

from __future__ import annotations

from math import prod

import numpy as np

from penstock.model.dequantize import layout_of
from penstock.model.tensor import STORAGE, Tensor


def random_tensor(rng: np.random.Generator, format: str, *shape: int) -> Tensor:
    """Returns a tensor of random bytes, with scales that keep its values small."""
    count = prod(shape) // STORAGE[format].values
    blocks = np.frombuffer(rng.bytes(count * STORAGE[format].bytes), layout_of(format)).copy()
    for field in blocks.dtype.names or ():
        if field in ("d", "m"):
            blocks[field] = rng.normal(0, 0.01, count)
        if field == "z":
            blocks[field] = rng.integers(0, 16, count)
    if format == "MXFP4":
        blocks["e"] = rng.integers(118, 124, count)
    if format == "NVFP4":
        blocks["scales"] = rng.integers(1, 24, (count, 4))
    if format == "IQ1_M":
        d = rng.normal(0, 0.01, count).astype(np.float16).view(np.uint16)
        blocks["scales"] = blocks["scales"] & 0xFFF | d[:, None] >> np.arange(0, 16, 4) << 12
    if format in ("F32", "F16"):
        blocks["x"] = rng.normal(size=count)
    if format == "BF16":
        blocks["x"] = rng.normal(size=count).astype(np.float32).view(np.uint32) >> 16
    return Tensor(f"random {format}", STORAGE[format], shape, blocks.view(np.uint8))

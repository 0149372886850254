"""Makes random weights in any format, for calibration and for tests of ops."""

from __future__ import annotations

from math import prod

import numpy as np

from penstock.model.dequantize import layout_of
from penstock.model.formats.trellis import MCG, NAME, TILE, Trellis, trellis_bits
from penstock.model.tensor import STORAGE, Format, Tensor


def random_tensor(rng: np.random.Generator, format: str, *shape: int) -> Tensor:
    """Returns a tensor of random bytes with scales that keep its values small. "EXL3-3" or "EXL3-3-mul1" select EXL3's
    bits and code book.
    """
    if format.startswith(NAME):
        return random_trellis(rng, format, *shape)
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


def random_trellis(rng: np.random.Generator, format: str, rows: int, width: int) -> Tensor:
    code_book = format.split("-")[2] if format.count("-") == 2 else MCG
    tiles = rng.integers(-(1 << 15), 1 << 15, (width // TILE, rows // TILE, TILE * trellis_bits(format)), np.int16)
    svh, suh = (rng.choice([-1, 1], size) * rng.uniform(0.05, 0.15, size) for size in (rows, width))
    made = Trellis(tiles, code_book, svh.astype(np.float32), suh.astype(np.float32))
    return Tensor(f"random {format}", Format(NAME, 1, 4), (rows, width), made)

"""Holds EXL3 weights: trellis-coded tiles of 16 x 16 numbers, multiplied by Hadamard matrices on both sides.

A tile with K bits per number is a ring of 256 * K bits. A number's state is the 16 bits that end with its own bits.
A code book maps the state to the number: a product whose halves or bytes are summed. The weight is
    W[out, in] = svh[out] * (H @ numbers @ H)[out, in] * suh[in]
with a Hadamard matrix H for 128 values at a time. A tensor computes these values on demand. Backends take the
components from `trellis_of`, and multiply with the numbers as they are:
    y = svh * (H @ (numbers @ (H @ (suh * x))))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.model.roles import MLA, Role
from penstock.model.tensor import Bytes, Tensor

TILE, HADAMARD_SIZE = 16, 128
PLAIN, MCG, MUL1 = "3inst", "mcg", "mul1"
FACTORS = {PLAIN: 89226354, MCG: 0xCBAC1FED, MUL1: 0x83DCD12D}
NAME = "EXL3"
WIDENED = MLA | {Role.EMBEDDING, Role.PER_LAYER_EMBEDDING, Role.POSITIONS}  # not used in plain matrix products

Array = NDArray[Any]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Trellis:
    """Holds a weight's components, and computes its values."""

    tiles: Array  # [inputs / 16, outputs / 16, 16 * bits] int16
    code_book: str
    svh: Floats  # [outputs]
    suh: Floats  # [inputs]

    @property
    def bits(self) -> int:
        return int(self.tiles.shape[2]) // TILE

    @property
    def name(self) -> str:
        return f"{NAME}-{self.bits}"

    @property
    def bits_with_vectors(self) -> float:
        return self.bits + 32 * (len(self.svh) + len(self.suh)) / (len(self.svh) * len(self.suh))

    def __call__(self, first: int, last: int) -> Bytes:
        start, end = first // HADAMARD_SIZE * HADAMARD_SIZE, -(-last // HADAMARD_SIZE) * HADAMARD_SIZE
        h = hadamard()
        found = np.empty((end - start, len(self.suh)), np.float32)
        for row in range(start, end, HADAMARD_SIZE):
            some = numbers_of(self.tiles[:, row // TILE : (row + HADAMARD_SIZE) // TILE], self.code_book)
            blocks = some.reshape(HADAMARD_SIZE, -1, HADAMARD_SIZE).swapaxes(0, 1)  # [blocks of inputs, 128, 128]
            made = (h @ blocks @ h).swapaxes(0, 1).reshape(HADAMARD_SIZE, -1)
            found[row - start : row - start + HADAMARD_SIZE] = made
        found *= self.svh[start:end, None]
        found *= self.suh
        return found[first - start : last - start].reshape(-1).view(np.uint8)

    def cut(self, first: int, last: int) -> Trellis | None:
        """Returns rows `first` to `last`; None if that splits a Hadamard matrix."""
        if first % HADAMARD_SIZE or last % HADAMARD_SIZE:
            return None
        return replace(self, tiles=self.tiles[:, first // TILE : last // TILE], svh=self.svh[first:last])


def trellis_bits(format: str) -> int:
    return int(format.split("-")[1])


def trellis_of(tensor: Tensor) -> Trellis | None:
    """Returns the tensor's trellis if it is a whole EXL3 weight for a plain product. MLA heads and row-indexed tables
    have no such kernel.
    """
    source = tensor.source
    return source if isinstance(source, Trellis) and tensor.role not in WIDENED else None


@cache
def code_book(kind: str) -> Floats:
    """Returns the number of each 16-bit state, all exact in float16: [65536]."""
    products = np.arange(1 << 16, dtype=np.uint32) * np.uint32(FACTORS[kind])
    if kind == MUL1:
        sums = products.view(np.uint8).reshape(-1, 4).sum(1, dtype=np.float32)
        step, middle = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float32)
        numbers: Floats = ((1024 + sums) * step + middle).astype(np.float16).astype(np.float32)
        return numbers
    if kind == PLAIN:
        products += np.uint32(64248484)
    halves = ((products & 0x8FFF8FFF) ^ 0x3B603B60).view(np.float16).reshape(-1, 2)
    return (halves[:, 0] + halves[:, 1]).astype(np.float32)


@cache
def places() -> Array:
    """Returns the index of the number at [in, out] of a tile. A lane's eight numbers lie in rows 2 * (lane % 4) + (0,
    1, 8, 9) of columns lane // 4 and lane // 4 + 8.
    """
    lane, own = np.divmod(np.arange(256), 8)
    row = 2 * (lane % 4) + own % 2 + own // 2 % 2 * 8
    column = lane // 4 + own // 4 * 8
    found = np.empty((TILE, TILE), np.intp)
    found[row, column] = np.arange(256)
    return found


@cache
def hadamard() -> Floats:
    """Returns the normalized Hadamard matrix: [128, 128]."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < HADAMARD_SIZE:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(np.sqrt(HADAMARD_SIZE))


def numbers_of(tiles: Array, kind: str) -> Floats:
    """Decodes tiles [down, across, words], with inputs down and outputs across: [16 * across, 16 * down]."""
    words = np.ascontiguousarray(tiles).view(np.uint32)  # the highest bit comes first
    count = words.shape[-1]
    ends = (np.arange(256) + 1) * (count // 8)
    last = (ends - 1) // 32
    pairs = words[..., last - 1].astype(np.uint64) << np.uint64(32) | words[..., last]
    states = (pairs >> (32 * (last + 1) - ends).astype(np.uint64)).astype(np.uint16)
    found = code_book(kind)[states[..., places()]]  # [down, across, in, out]
    matrix: Floats = found.transpose(1, 3, 0, 2).reshape(TILE * tiles.shape[1], TILE * tiles.shape[0])
    return matrix

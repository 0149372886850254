"""Unpacks small codes from words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
Codes = NDArray[np.uint8]


def unpack(words: Words, bits: int) -> Codes:
    """Splits each row, a bit stream with the lowest bits first, into codes: [rows, n] -> [rows, codes]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    rows = len(data)
    if bits == 8:
        return data
    if 8 % bits:
        stream = np.unpackbits(data, axis=1, bitorder="little")
        return np.packbits(stream.reshape(rows, -1, bits), axis=2, bitorder="little")[..., 0]
    codes = np.empty((*data.shape, 8 // bits), np.uint8)
    for i in range(8 // bits):
        np.bitwise_and(data >> (i * bits), (1 << bits) - 1, out=codes[..., i])
    return codes.reshape(rows, -1)


def unpack_range(words: Words, bits: int, first: int, last: int) -> Codes:
    """Unpacks only codes `first` to `last` of each row."""
    start, end = first // 32, -(-last // 32)
    return unpack(words[:, start * bits : end * bits], bits)[:, first - 32 * start : last - 32 * start]


def unpack_columns(words: Words, bits: int) -> Codes:
    """Unpacks each column of words into a row of codes: [n, columns] -> [columns, codes]."""
    return unpack(np.ascontiguousarray(words.T), bits)

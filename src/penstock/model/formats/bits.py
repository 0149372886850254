"""Codes of a few bits out of words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
Codes = NDArray[np.uint8]


def fields(words: Words, bits: int) -> Codes:
    """Each row of words as one stream of bits, lowest first, cut into codes: [rows, n] -> [rows, 8 * bytes / bits]."""
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


def fields_across(words: Words, bits: int, first: int, last: int) -> Codes:
    """The same, of codes `first` to `last` of each row alone."""
    start, end = first // 32, -(-last // 32)
    return fields(words[:, start * bits : end * bits], bits)[:, first - 32 * start : last - 32 * start]


def fields_down(words: Words, bits: int) -> Codes:
    """The same of columns, each of which becomes a row: [n, columns] -> [columns, 8 * bytes / bits]."""
    return fields(np.ascontiguousarray(words.T), bits)

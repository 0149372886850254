"""Reads the code books of GGUF's i-quants: each point of a book holds the levels of 4 or 8 neighbouring values."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TEXT = Path(__file__).with_name("code_books.inc")

# In the text's order: levels per value, values per point
BOOKS = {"IQ2_XXS": (3, 8), "IQ2_XS": (3, 8), "IQ2_S": (3, 8), "IQ1_S": (3, 8), "IQ3_XXS": (8, 4), "IQ3_S": (8, 4)}


@lru_cache(maxsize=1)
def code_books() -> dict[str, NDArray[np.uint8]]:
    """Returns the levels of each book's points, in order: [points, values]."""
    lines = TEXT.read_text().splitlines()
    words = [int(word, 16) for line in lines if line.startswith("0x") for word in line.replace(",", "").split()]
    bits = np.unpackbits(np.array(words, "<u8").view(np.uint8), bitorder="little")
    books, at = {}, 0
    for name, (levels, values) in BOOKS.items():
        points = np.flatnonzero(bits[at : at + levels**values])
        books[name] = (points[:, None] // levels ** np.arange(values) % levels).astype(np.uint8)
        at += -(-(levels**values) // 64) * 64
    return books

"""Defines the checksum of KV blocks that stay on a device. GPUs compute it fast, and CPUs can compute it too.

A block is read as 32-bit words. The checksum is the sum of each word times the weight of its place, modulo 2**64.
Weights are odd, so a change of one word always changes the sum. They look random, so words that are swapped, shifted or
wrong in several places change it too, but for one case in billions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORD = np.dtype("<i4")
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio
MIXED = np.uint64(0xBF58476D1CE4E5B9)
HALF = np.uint64(32)


def word_weights(words: int) -> NDArray[np.int64]:
    mixed = np.arange(1, words + 1, dtype=np.uint64) * GOLDEN
    mixed = (mixed ^ (mixed >> HALF)) * MIXED
    return ((mixed ^ (mixed >> HALF)) | np.uint64(1)).view(np.int64)


def block_checksums(rows: NDArray[np.uint8]) -> list[int]:
    """Returns the checksum of each row, as an unsigned number: the reference."""
    words = np.ascontiguousarray(rows).view(WORD).astype(np.int64)
    return [int(each) for each in (words * word_weights(words.shape[1])).sum(axis=1).view(np.uint64)]

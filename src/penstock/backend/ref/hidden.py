"""Holds hidden states that programs hand to each other in KV blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Batch, Floats

Places = tuple[NDArray[np.integer], NDArray[np.integer]]


class RefHidden:
    """Holds the hidden states of all programs: for each kind [blocks, block_size, width]."""

    def __init__(self) -> None:
        self.reserve(1, 1)

    def reserve(self, num_blocks: int, block_size: int) -> None:
        self._shape = num_blocks, block_size
        self.arrays: dict[int, Floats] = {}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def store(self, number: int, x: Floats, batch: Batch, group: int, ahead: int) -> None:
        """Stores a row for each of the step's tokens or for those that are sampled, `ahead` positions further, in the
        blocks of a layer group."""
        tokens = np.arange(len(x)) if len(x) == len(batch.tokens) else batch.sampled
        self._kind(number, x.shape[1])[self._places(batch, group, tokens, ahead)] = x

    def load(self, number: int, width: int, batch: Batch, group: int) -> Floats:
        return self._kind(number, width)[self._places(batch, group, np.arange(len(batch.tokens)), 0)]

    def _kind(self, number: int, width: int) -> Floats:
        if number not in self.arrays:
            self.arrays[number] = np.zeros((*self._shape, width), np.float32)
        found = self.arrays[number].shape[2]
        assert found == width, f"hidden states {number} have {found} values, not {width}"
        return self.arrays[number]

    def _places(self, batch: Batch, group: int, tokens: NDArray[np.integer], ahead: int) -> Places:
        rows = np.searchsorted(batch.row_start, tokens, side="right") - 1
        positions, size = batch.positions[tokens] + ahead, self._shape[1]
        return batch.tables[group, rows, positions // size], positions % size

"""Describes how a LoRA adapter changes packed weights; a backend computes it as products of two thin matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Spans = Sequence[tuple[int, int]]  # row ranges, each (first, last + 1)


class PlacedPart(NamedTuple):
    """Names a tensor whose rows, or some spans of them, are part of a packed weight."""

    name: str  # canonical
    rows: int  # row count of the whole tensor
    spans: Spans | None = None  # None: all rows

    @property
    def packed_rows(self) -> int:
        return self.rows if self.spans is None else sum(last - first for first, last in self.spans)

    def take(self, values: Floats) -> Floats:
        if self.spans is None:
            return values
        return np.concatenate([values[first:last] for first, last in self.spans])


class Placement(NamedTuple):
    """Lists the tensors that a packed weight stacks."""

    weight: Any  # the result of the backend's `pack_matrix`
    parts: tuple[PlacedPart, ...]


class LowRankPart(NamedTuple):
    """Adds b @ a to consecutive rows of a packed weight, starting at row `first`. `b` includes all scales."""

    first: int
    a: Floats  # [rank, in]
    b: Floats  # [rows, rank]


class LowRankUpdate(NamedTuple):
    """Describes how an adapter changes one packed weight: x @ weight.T gets x @ a.T @ b.T added, in the rows of each
    part.
    """

    weight: Any  # the key by which a backend finds its products
    parts: tuple[LowRankPart, ...]

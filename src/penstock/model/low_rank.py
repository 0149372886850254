"""Describes how an adapter (LoRA) changes packed weights, which a backend computes as products of two thin matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Spans = Sequence[tuple[int, int]]  # ranges of rows, each (first, last + 1)


class PlacedPart(NamedTuple):
    """Names a tensor whose rows, or some spans of them, are a part of a packed weight."""

    name: str  # canonical
    rows: int  # of the whole tensor
    spans: Spans | None = None  # None: all rows

    @property
    def packed_rows(self) -> int:
        """Returns how many rows of the packed weight the part takes."""
        return self.rows if self.spans is None else sum(last - first for first, last in self.spans)

    def take(self, values: Floats) -> Floats:
        """Returns the part's rows of a matrix that has a row for each of the tensor's."""
        if self.spans is None:
            return values
        return np.concatenate([values[first:last] for first, last in self.spans])


class Placement(NamedTuple):
    """Says which tensors a packed weight is made of, one below the other."""

    weight: Any  # what the backend's `pack_matrix` returned
    parts: tuple[PlacedPart, ...]


class LowRankPart(NamedTuple):
    """Adds b @ a to consecutive rows of a packed weight, from row `first` on. All scales are in `b` already."""

    first: int
    a: Floats  # [rank, in]
    b: Floats  # [rows, rank]


class LowRankUpdate(NamedTuple):
    """Says how an adapter changes one packed weight: x @ weight.T gets x @ a.T @ b.T added, in rows of each part."""

    weight: Any  # a backend finds its products by this object
    parts: tuple[LowRankPart, ...]

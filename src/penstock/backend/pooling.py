"""Pools hidden states, in NumPy: this is the definition, and what backends on the host use.

States are added up in the order of their positions and in double precision, so that the mean depends neither on how a
prompt was cut into rows nor on what else was computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Batch, Floats
from penstock.types import StepResult

States = Callable[[int, int], Floats]  # hidden states of tokens[first:last]


class Pools:
    """Keeps unfinished sums by slot. The next sequence overwrites the sum of one that ended early."""

    def __init__(self) -> None:
        self._sums: dict[int, NDArray[np.float64]] = {}

    def answer(self, batch: Batch, result: StepResult, states: States) -> StepResult:
        found: dict[int, Floats] = {}
        for pool in batch.pools:
            slot, added = int(batch.slots[pool.row]), states(pool.first, pool.last)
            if pool.begins:
                self._sums[slot] = np.zeros(added.shape[1])
            total = self._sums[slot]
            for state in added:
                total += state
            if pool.divisor:
                found[pool.row] = (self._sums.pop(slot) / pool.divisor).astype(np.float32)
        return with_pooled(result, found)


def with_pooled(result: StepResult, found: Mapping[int, Floats]) -> StepResult:
    """Returns the result with the means that were `found`, by row. A mean that is not finite is left out."""
    rows, broken = list(result.rows), list(result.not_finite)
    for row, mean in found.items():
        rows[row] = rows[row]._replace(pooled=mean.astype("<f4").tobytes())
        broken += [] if np.isfinite(mean).all() else [row]
    return StepResult(result.step, tuple(rows), tuple(broken))

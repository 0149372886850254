"""Defines what adapters mean, in float32 NumPy: a row's product gets the update of the row's own adapter added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.backend.base import Batch, Floats
from penstock.model.low_rank import LowRankUpdate

LoadedAdapters = Mapping[int, "RefAdapter"]  # key: slot


class RefAdapter:
    """Holds an adapter's updates by the identity of the weight that each changes."""

    def __init__(self, updates: Sequence[LowRankUpdate]) -> None:
        self._updates = {id(update.weight): update for update in updates}

    @property
    def nbytes(self) -> int:
        return sum(part.a.nbytes + part.b.nbytes for update in self._updates.values() for part in update.parts)

    def changes(self, weight: Any) -> bool:
        return id(weight) in self._updates

    def add(self, x: Floats, y: Floats, weight: Any) -> None:
        for part in self._updates[id(weight)].parts:
            y[:, part.first : part.first + len(part.b)] += x @ part.a.T @ part.b.T


class RefAdapters:
    """Keeps adapters in slots: see AdapterSlots."""

    def __init__(self) -> None:
        self.slots: dict[int, RefAdapter] = {}

    def pack(self, updates: Sequence[LowRankUpdate]) -> RefAdapter:
        return RefAdapter(updates)

    def load(self, slot: int, packed: RefAdapter) -> None:
        self.slots[slot] = packed

    def drop(self, slot: int) -> None:
        del self.slots[slot]


def adapted(x: Floats, y: Floats, weight: Any, batch: Batch, adapters: LoadedAdapters) -> Floats:
    changing = [slot for slot in np.unique(batch.adapters).tolist() if slot >= 0 and adapters[slot].changes(weight)]
    if not changing:
        return y
    slots = batch.adapter_rows
    if len(x) != len(slots):
        slots = slots[batch.sampled]
    y = y.copy()
    for slot in changing:
        rows = np.flatnonzero(slots == slot)
        changed = y[rows]
        adapters[slot].add(x[rows], changed, weight)
        y[rows] = changed
    return y

"""Pooling hidden states on the device; see backend/pooling.py for what that means."""

from __future__ import annotations

from typing import Any

import torch

from penstock.backend.base import Batch, Floats
from penstock.backend.cuda.sampler import to_host


class PoolingSums:
    """Sums under way, by slot: made when the first embedding is asked for. With `in_order`, states are added one by
    one: then a sum does not depend on how a prompt was divided into steps."""

    def __init__(self, slots: int, *, in_order: bool = False) -> None:
        self._slots = slots
        self._in_order = in_order
        self._sums: Any = None  # [slots, dim] float32

    def take(self, batch: Batch, states: Any) -> dict[int, Any]:
        """Queues the sums over states [T, dim]; returns the means, by row, that are on their way to the host."""
        if self._sums is None:
            self._sums = torch.zeros((self._slots, states.shape[1]), device=states.device)
        found: dict[int, Any] = {}
        for pool in batch.pools:
            total, added = self._sums[batch.slots[pool.row]], states[pool.first : pool.last]
            if pool.begins:
                total.zero_()
            for part in added if self._in_order else (added.sum(0, dtype=torch.float32),):
                total += part
            if pool.divisor:
                found[pool.row] = to_host(total / pool.divisor)
        return found


def read(found: dict[int, Any]) -> dict[int, Floats]:
    return {row: mean.numpy() for row, mean in found.items()}

"""RecurrentStates of sequences on the device, and what a step's rows do with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.backend.base import Batch, Ints
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.inputs import DeviceInputs
from penstock.backend.cuda.kernels.causal_conv import ROW_FIELDS, StateRows
from penstock.model.recurrence import RecurrentSpec


class RecurrentStates:
    """Holds the recurrent states of a model that has any. The numbers of a step's rows are at one place, whatever its
    shape."""

    def __init__(self, specs: dict[int, RecurrentSpec], rows: int, tokens: int, device: torch.device) -> None:
        self._specs = specs
        self._rows = rows
        self._numbers = torch.zeros(words(rows, tokens), dtype=torch.int32, device=device)
        self.layers: dict[int, Any] = {}  # [states, floats] of each

    def __bool__(self) -> bool:
        return bool(self._specs)

    @property
    def bytes(self) -> int:
        """Returns the bytes of one sequence's state."""
        return 4 * sum(spec.state_floats for spec in self._specs.values())

    def reserve(self, count: int, arena: Arena) -> None:
        self.layers.clear()
        for layer, spec in self._specs.items():
            self.layers[layer] = arena.zeros((count, spec.state_floats))

    def send(self, batch: Batch, staged: Any) -> None:
        """Queues the copy of what rows do, by way of host memory that is read later."""
        fill(staged.numpy(), batch, self._rows)
        self._numbers.copy_(staged, non_blocking=True)

    def rows_of(self, step: DeviceInputs) -> StateRows:
        """Returns as many rows as a step of this shape can have: each has a part or a tile of attention."""
        count, tokens = self._rows * ROW_FIELDS, len(step.tokens)
        most = min(tokens, len(step.splits) + len(step.tiles), self._rows)
        return StateRows(
            self._numbers[:count].view(self._rows, ROW_FIELDS)[:most], self._numbers[count : count + tokens]
        )


def words(rows: int, tokens: int) -> int:
    return rows * ROW_FIELDS + tokens


def fill(words: Ints, batch: Batch, rows: int) -> None:
    """The rows of a batch and, after all that there can be, the row of each token."""
    into, of_tokens = words[: rows * ROW_FIELDS].reshape(rows, ROW_FIELDS), words[rows * ROW_FIELDS :]
    count, first, counts = len(batch.slots), batch.row_start[:-1], np.diff(batch.row_start)
    into[:count, 0] = first
    into[:count, 1] = counts
    into[:count, 2] = batch.slots
    into[:count, 3] = np.where(batch.positions[first] == 0, -1, batch.slots) if count else 0
    into[:count, 4] = -1
    into[count:, 1] = 0
    for move in batch.moves:
        if move.begin >= 0:
            into[move.row, 3] = move.begin
        into[move.row, 4:6] = move.save, move.after
    of_tokens[: len(batch.tokens)] = np.repeat(np.arange(count), counts)
    of_tokens[len(batch.tokens) :] = -1

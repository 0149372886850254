"""Keeps recurrent states of sequences on the device, and plans their use by a step's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.backend.base import Batch, Ints
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.kernels.causal_conv import CHUNK_FIELDS, ROW_FIELDS, StateRows
from penstock.backend.cuda.step_layout import DeviceInputs
from penstock.model.recurrence import CHUNK, RecurrentSpec

# Tokens of a row that is divided into chunks. A chunk takes about as long with few tokens as with all: on an H200 as
# long as 22 of them one by one.
LEAST_CHUNKED = CHUNK // 2


class RecurrentStates:
    """Holds the recurrent states of a model that has any. The numbers of a step's rows are at one place, for all
    shapes."""

    def __init__(self, specs: dict[int, RecurrentSpec], rows: int, tokens: int, device: torch.device) -> None:
        self._specs = specs
        self._rows = rows
        self._tokens = tokens
        self._numbers = torch.zeros(words(rows, tokens), dtype=torch.int32, device=device)
        self.layers: dict[int, Any] = {}  # [states, floats] of each

    def __bool__(self) -> bool:
        return bool(self._specs)

    @property
    def bytes(self) -> int:
        return 4 * sum(spec.state_floats for spec in self._specs.values())

    def reserve(self, count: int, arena: Arena) -> None:
        self.layers.clear()
        for layer, spec in self._specs.items():
            self.layers[layer] = arena.zeros((count, spec.state_floats))

    def send(self, batch: Batch, staged: Any) -> None:
        fill(staged.numpy(), batch, self._rows, self._tokens)
        self._numbers.copy_(staged, non_blocking=True)

    def rows_of(self, step: DeviceInputs) -> StateRows:
        """Returns all rows that a step of this shape can have: each has a part or a tile of attention."""
        tokens = len(step.tokens)
        most = min(tokens, len(step.splits) + len(step.tiles), self._rows)
        numbers, of_tokens, chunks = split(self._numbers, self._rows, self._tokens)
        return StateRows(numbers[:most], of_tokens[:tokens], chunks[: most_chunks(most, tokens)])


def words(rows: int, tokens: int) -> int:
    return rows * ROW_FIELDS + tokens + most_chunks(rows, tokens) * CHUNK_FIELDS


def most_chunks(rows: int, tokens: int) -> int:
    """Returns the most chunks of a step with `rows` rows and `tokens` tokens. A row that is divided may have three
    that are not full: the first and the last one, and one that ends where a state is saved."""
    return tokens // CHUNK + 3 * min(rows, tokens // LEAST_CHUNKED)


def split(words: Any, rows: int, tokens: int) -> tuple[Any, Any, Any]:
    at = rows * ROW_FIELDS
    return words[:at].reshape(rows, ROW_FIELDS), words[at : at + tokens], words[at + tokens :].reshape(-1, CHUNK_FIELDS)


def fill(words: Ints, batch: Batch, rows: int, tokens: int) -> None:
    into, of_tokens, chunks = split(words, rows, tokens)
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
    fill_chunks(chunks, into, batch)


def fill_chunks(chunks: Ints, rows: Ints, batch: Batch) -> None:
    """Divides long rows where their positions are multiples of CHUNK, and where a state is saved. No other row has a
    chunk, those that only pad among them."""
    rows[:, 6:8] = 0
    used = 0
    for index in np.flatnonzero(rows[:, 1] >= LEAST_CHUNKED):
        first, count, _, _, save, after = rows[index, :6].tolist()
        ahead = -int(batch.positions[first]) % CHUNK
        cuts = {first, first + count, *range(first + ahead, first + count, CHUNK)}
        ends = np.array(sorted(cuts | {first + after} if save >= 0 else cuts))
        rows[index, 6:8] = used, len(ends) - 1
        chunks[used : used + len(ends) - 1] = np.stack([ends[:-1], np.diff(ends)], axis=1)
        used += len(ends) - 1
    chunks[used:] = 0

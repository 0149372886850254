"""Keeps hidden states in KV blocks, where one program stores them for another: a head drafts from its target's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.backend.base import Batch, Ints
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.flight import IN_FLIGHT
from penstock.backend.cuda.kv_cache import LayerCache
from penstock.backend.cuda.step_layout import put
from penstock.errors import UnsupportedModel
from penstock.model.program import Program


class HiddenStates:
    """Holds a row of hidden states for each place in the KV cache, of each kind. All programs share it."""

    def __init__(self, dtype: torch.dtype, arena: Arena) -> None:
        self._dtype = dtype
        self._arena = arena
        self._widths: dict[int, int] = {}
        self._arrays: dict[int, Any] = {}  # [blocks, block_size, width]

    def declare(self, widths: Mapping[int, int]) -> None:
        """Adds the kinds that a program stores or loads, with their widths. Raises UnsupportedModel if
        another program has other widths."""
        for number, width in widths.items():
            if self._widths.setdefault(number, width) != width:
                raise UnsupportedModel(
                    f"a program has {width} values of hidden states {number}; another has {self._widths[number]}"
                )

    @property
    def bytes_per_token(self) -> int:
        return sum(self._widths.values()) * int(self._dtype.itemsize)

    def reserve(self, size: tuple[int, int]) -> None:
        self._arrays = {kind: self._arena.zeros((*size, width), self._dtype) for kind, width in self._widths.items()}

    def free(self) -> None:
        self._arrays.clear()

    @property
    def planes(self) -> list[LayerCache]:
        return [LayerCache(self._arrays[kind], None) for kind in sorted(self._arrays)]

    def rows(self, number: int) -> Any:
        """Returns the rows of one kind by place: [places, width]."""
        return self._arrays[number].view(-1, self._widths[number])


class StoredRows(NamedTuple):
    """Says which rows of a step a node stores, and how many positions after their own."""

    sampled: bool  # False: all tokens
    ahead: int


EACH_TOKEN = StoredRows(False, 0)  # at its own place


class HiddenPlaces:
    """Tells where a program's steps store rows other than each token's at its own place. A step that stores rows of
    sampled positions samples all of them at once."""

    def __init__(self, recorded: Program, tokens: int, device: torch.device) -> None:
        stores = [
            StoredRows(node.inputs[0].symbol == "S", node.attributes["ahead"])
            for node in recorded.nodes
            if node.op == "store_hidden"
        ]
        self._stores = [rows for rows in dict.fromkeys(stores) if rows != EACH_TOKEN]
        size = len(self._stores), tokens
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staged = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]

    def __bool__(self) -> bool:
        return bool(self._stores)

    def send(self, batch: Batch, turn: int, group: int, blocks: tuple[int, int]) -> None:
        """Queues the copy of a step's places, by way of host memory that is read later. `blocks` are their number and
        the positions of each; `group` is the KV layer group that the rows lie in."""
        fill_places(self._staged[turn].numpy(), self._stores, batch, group, blocks)
        self._numbers.copy_(self._staged[turn], non_blocking=True)

    def of(self, rows: StoredRows, count: int) -> Any:
        return self._numbers[self._stores.index(rows), :count]


def fill_places(into: Ints, stores: Sequence[StoredRows], batch: Batch, group: int, blocks: tuple[int, int]) -> None:
    """Writes the place of each row; padding goes to the block after the last."""
    (count, size), table = blocks, batch.tables[group]
    owner = np.repeat(np.arange(len(batch.slots)), np.diff(batch.row_start))  # [T]
    for line, (sampled, ahead) in zip(into, stores, strict=True):
        tokens = batch.sampled if sampled else np.arange(len(batch.tokens))
        positions = batch.positions[tokens] + ahead
        put(line, table[owner[tokens], positions // size] * size + positions % size, count * size)

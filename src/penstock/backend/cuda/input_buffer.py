"""Sends the numbers of steps to the device, to the place where kernels and graphs read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from penstock.backend.base import Batch, Ints
from penstock.backend.cuda import inputs, step_layout
from penstock.backend.cuda.contexts import MOST_BLOCKS
from penstock.backend.cuda.flight import IN_FLIGHT
from penstock.backend.cuda.inputs import AttentionPlan, Shape
from penstock.backend.cuda.launch_context import Memory
from penstock.backend.cuda.program import StepSizes
from penstock.backend.cuda.recurrent_states import words
from penstock.backend.cuda.segments import most_splits
from penstock.backend.cuda.shared_prefixes import SPLITS as SHARED_SPLITS
from penstock.backend.cuda.staging import Event, Staging
from penstock.backend.cuda.step_layout import DeviceInputs, StepNumbers

TABLE_WORDS = 1 << 20
SPARE_TILES = 64  # padding
KEPT = 256  # shapes whose fields are remembered
Fields = Callable[[Shape, int], DeviceInputs]
StagedFields = Callable[[int, Shape, int], DeviceInputs]


class InputBuffer:
    """Holds the numbers of the step that runs. All programs share it, because their steps run one after the other."""

    def __init__(self, device: torch.device, sizes: StepSizes, record: Callable[[], Event | None]) -> None:
        self._device = device
        self._sizes = sizes
        self._record = record  # returns an event that happens when all that is queued now has
        self._table_words = TABLE_WORDS

    def reserve(self, blocks: int, block_size: int, groups: int) -> None:
        """Makes room for steps over a KV cache with `groups` layer groups. Graphs made before read another place."""
        self._blocks, self._block_size, self._groups = blocks, block_size, groups
        self._reserve()

    def grow(self, batch: Batch) -> bool:
        """Makes room for the batch's block tables; returns whether there was none. Graphs made before then read another
        place."""
        if batch.tables.size <= self._table_words:
            return False
        self._table_words = 2 * batch.tables.size
        self._reserve()
        return True

    def send(self, batch: Batch, plan: AttentionPlan, memory: Memory) -> DeviceInputs:
        """Queues the copy of a step's numbers to the device, for the program with this memory; returns where they will
        be. Rows that only pad the step write to the block after the last one and to the slot after the last one."""
        staged = self._staging.take()
        turn, groups = self._staging.turn, len(batch.tables)
        numbers = StepNumbers(batch, plan, self._block_size, self._blocks, self._sizes.rows)
        count = step_layout.fill(self._staged(turn, plan.shape, groups), numbers)
        self._words[:count].copy_(staged[:count], non_blocking=True)
        if memory.states:
            memory.states.send(batch, self._row_words[turn])
        if memory.hidden_places:
            memory.hidden_places.send(batch, turn, memory.kv.hidden_group, (self._blocks, self._block_size))
        self._staging.queued()
        return self._fields(plan.shape, groups)

    def _reserve(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps in flight read the old buffer
        t, r = self._sizes.tokens, self._sizes.rows
        splits = max(r + inputs.MOST_SPARE, most_splits(t, r, 1))
        expanded = 2 * MOST_BLOCKS  # they are rounded up to a power of two
        largest = Shape(t, t, r, splits, t + SPARE_TILES, t, shared=SHARED_SPLITS, expanded=expanded)
        count = step_layout.words(largest, self._groups) + self._table_words
        pinned = {"dtype": torch.int32, "pin_memory": self._device.type == "cuda"}
        self._words: Any = torch.zeros(count, dtype=torch.int32, device=self._device)
        staged = [torch.zeros(count, **pinned) for _ in range(IN_FLIGHT)]
        self._staging = Staging(staged, self._record)
        self._row_words = [torch.zeros(words(r, t), **pinned) for _ in range(IN_FLIGHT)]
        self._fields, self._staged = fields_of(self._words, [buffer.numpy() for buffer in staged])


def fields_of(on_device: Any, staged: Sequence[Ints]) -> tuple[Fields, StagedFields]:
    """Returns functions that make the fields of a shape and a number of layer groups, on the device and in each host
    buffer. They cache them: steps have few shapes, and views take time."""

    @lru_cache(KEPT)
    def fields(shape: Shape, groups: int) -> DeviceInputs:
        return step_layout.device_inputs(on_device, shape, lambda view: view.view(torch.float32), groups)

    @lru_cache(KEPT * len(staged))
    def staged_fields(turn: int, shape: Shape, groups: int) -> DeviceInputs:
        return step_layout.device_inputs(staged[turn], shape, step_layout.as_floats, groups)

    return fields, staged_fields

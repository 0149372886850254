"""Turns a plan into a batch: it is the one place where sequences and blocks become arrays."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Line
from typing import NamedTuple

import numpy as np

from penstock.backend.base import LAST_SAMPLED, Batch, Ints, Pool, StateMove
from penstock.core import Sequence
from penstock.engine.request_record import RequestRecord
from penstock.engine.samplers.sampler import Sampler, Wanted, constrained_positions, sample_rows, wanted_positions
from penstock.types import Limits, Row, StepPlan


class Batcher:
    """Keeps a slot and a block table for every running sequence, changed only by the updates of a plan."""

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._max_rows = limits.max_rows
        width = -(-limits.max_len // limits.block_size)
        self._tables = np.zeros((len(limits.windows), limits.max_rows, width), np.int32)
        self._slots: dict[int, int] = {}
        self._free = list(range(limits.max_rows - 1, -1, -1))

    def apply(self, plan: StepPlan) -> None:
        """Applies the plan's changes to block tables. It must be called for every plan, even for one without rows."""
        for seq in plan.dropped:
            self._free.append(self._slots.pop(seq))
        for grown in plan.grown:
            slot = self._slots.get(grown.seq)
            if slot is None:
                slot = self._slots[grown.seq] = self._free.pop()
            self._tables[grown.group, slot, grown.at : grown.at + len(grown.blocks)] = grown.blocks

    def build(self, plan: StepPlan, sequences: Mapping[int, Sequence], records: Mapping[int, RequestRecord]) -> Batch:
        tokens: list[int] = []
        positions: list[int] = []
        sampled: list[int] = []
        wanted: list[Wanted] = []
        row_start, sample_start = [0], [0]
        adapters: list[int] = []
        pooled = False
        for row in plan.rows:
            seq, record = sequences[row.seq], records[row.seq]
            end = row.start + row.count
            known = seq.tokens[row.start : end]
            tokens += known
            if len(known) < row.count:
                tokens += row.draft or [LAST_SAMPLED] * (row.count - len(known))
            positions += range(row.start, end)
            sampled += range(len(tokens) - row.sample, len(tokens))
            wanted += wanted_positions(record.sampler, seq.tokens, row)
            row_start.append(len(tokens))
            sample_start.append(len(sampled))
            adapters.append(record.adapter_slot)
            pooled = pooled or bool(record.request.pooling)
        slots = np.array([self._slots[row.seq] for row in plan.rows], np.int32)
        width = -(-max(row.start + row.count for row in plan.rows) // self._block_size)
        return Batch(
            step=plan.step,
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            row_start=np.array(row_start, np.int32),
            slots=slots,
            tables=self._tables_of(slots, width),
            sampled=np.array(sampled, np.int32),
            sample_start=np.array(sample_start, np.int32),
            sample=sample_rows(wanted),
            constrained=constrained_positions(wanted),
            pools=pools(plan, sequences, records) if pooled else (),
            adapters=np.array(adapters if max(adapters) >= 0 else (), np.int32),
            moves=tuple(self._move(at, row) for at, row in enumerate(plan.rows) if row.begin >= 0 or row.save >= 0),
        )

    def _tables_of(self, slots: Ints, width: int) -> Ints:
        """Returns copies of the slots' block tables: [groups, rows, width]."""
        tables = np.empty((len(self._tables), len(slots), width), np.int32)
        for group, table in enumerate(self._tables):
            tables[group] = table[slots, :width]
        return tables

    def _move(self, at: int, row: Row) -> StateMove:
        """Returns the places that a row's recurrent state comes from and goes to. Saved states follow the states of the
        slots."""
        begin, save = (-1 if place < 0 else self._max_rows + place for place in (row.begin, row.save))
        return StateMove(at, begin, save, row.at - row.start)


def bitmasks(plan: StepPlan, batch: Batch, records: Mapping[int, RequestRecord]) -> Ints:
    """Returns the bitmask of each constrained position of a plan's batch: [C, ceil(vocab / 32)]."""
    rows = np.searchsorted(batch.sample_start, batch.constrained, side="right") - 1
    owners = [plan.rows[row] for row in dict.fromkeys(rows.tolist())]
    return np.stack([mask for row in owners for mask in records[row.seq].sampler.bitmasks(row.draft)])


class DraftRow(NamedTuple):
    """Describes a row of a draft program's step: it computes text[start:stop], whose KV lies in the blocks of `table`,
    and `sampler`, if any, chooses the next token. If the text is one short, the last token is the slot's last sampled
    token. Tokens stand `shift` positions before their own."""

    text: list[int]
    start: int
    stop: int
    table: Ints
    sampler: Sampler | None
    slot: int = 0
    shift: int = 0

    @property
    def tokens(self) -> list[int]:
        known = self.text[self.start : self.stop]
        return known + [LAST_SAMPLED] * (self.stop - self.start - len(known))


def draft_batch(rows: Line[DraftRow], block_size: int, program: int, step: int) -> Batch:
    counts = [row.stop - row.start for row in rows]
    row_start = np.cumsum([0, *counts], dtype=np.int32)
    wanted = [Wanted(row.sampler, row.text, row.stop - 1) for row in rows if row.sampler is not None]
    samples = [row.sampler is not None for row in rows]
    tables = np.zeros((1, len(rows), -(-max(row.stop for row in rows) // block_size)), np.int32)
    for at, row in enumerate(rows):
        blocks = row.table[: -(-row.stop // block_size)]
        tables[0, at, : len(blocks)] = blocks
    return Batch(
        step=step,
        tokens=np.array([token for row in rows for token in row.tokens], np.int32),
        positions=np.array([at - row.shift for row in rows for at in range(row.start, row.stop)], np.int32),
        row_start=row_start,
        slots=np.array([row.slot for row in rows], np.int32),
        tables=tables,
        sampled=row_start[1:][samples] - np.int32(1),
        sample_start=np.cumsum([0, *samples], dtype=np.int32),
        sample=sample_rows(wanted),
        constrained=constrained_positions(wanted),
        program=program,
    )


def pools(plan: StepPlan, sequences: Mapping[int, Sequence], records: Mapping[int, RequestRecord]) -> tuple[Pool, ...]:
    """Returns the positions that a step pools. A mean restarts with its sequence, so no token counts twice after a
    preemption."""
    found: list[Pool] = []
    last = 0
    for index, row in enumerate(plan.rows):
        first, last = last, last + row.count
        kind = records[row.seq].pooling
        computed = row.start + row.count
        ends = computed == sequences[row.seq].prompt_len
        if kind == "mean":
            found.append(Pool(index, first, last, row.start == 0, computed if ends else 0))
        elif kind == "cls" and row.start == 0:
            found.append(Pool(index, first, first + 1, True, 1))
        elif kind == "last" and ends:
            found.append(Pool(index, last - 1, last, True, 1))
    return tuple(found)

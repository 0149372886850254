"""A step's numbers for the device: one buffer of 32-bit words, sent with one copy.

A graph reads each field at a place that its shape alone decides, so block tables, whose width changes from step to
step, come last and their width is a number like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from penstock.backend.base import Batch, Floats, Ints

ALIGNMENT = 4  # words: kernels load 16 bytes at a time
SPARE_PARTS = 64  # beyond one for each row, so that few long contexts still fill the device
SHORTEST_PART = 64


class Shape(NamedTuple):
    """How many of everything a step has room for."""

    tokens: int
    sampled: int
    decodes: int  # rows of one token
    parts: int  # that the contexts of those are cut into
    tiles: int  # of rows with more than one token


@dataclass(frozen=True, slots=True)
class Fields:
    """Views of the buffer, on either side."""

    header: Any  # [4] the tables' width
    tokens: Any  # [T]
    positions: Any  # [T]
    token_slots: Any  # [T]
    places: Any  # [T] in the cache, counted in tokens
    parts: Any  # [P, 8] see decode_attention
    tiles: Any  # [Q, 5] see prefill_attention
    sampled: Any  # [S]
    target: Any  # [S]
    sample_slots: Any  # [S] where the sampled token is kept for the next step
    temperature: Any  # [S] float32
    top_p: Any  # [S] float32
    top_k: Any  # [S]
    min_p: Any  # [S] float32
    seeds: Any  # [S, 2] low word, high word
    tables: Any  # [rows * width]


NAMES = tuple(entry.name for entry in dataclass_fields(Fields))[:-1]
FLOATS = ("temperature", "top_p", "min_p")


@lru_cache(maxsize=512)
def offsets(shape: Shape) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """(begin, end, shape) of every field but the tables."""
    t, s, _, p, q = shape
    sizes = ((4,), (t,), (t,), (t,), (t,), (p, 8), (q, 5), *[(s,)] * 7, (s, 2))
    found = []
    at = 0
    for size in sizes:
        count = size[0] * (size[1] if len(size) == 2 else 1)
        found.append((at, at + count, size))
        at += -(-count // ALIGNMENT) * ALIGNMENT
    return tuple(found)


def words(shape: Shape) -> int:
    """What the fields before the tables take."""
    end = offsets(shape)[-1][1]
    return -(-end // ALIGNMENT) * ALIGNMENT


def fields(buffer: Any, shape: Shape, as_float: Callable[[Any], Any]) -> Fields:
    """The fields of a flat buffer, of NumPy or torch."""
    views = {
        name: buffer[begin:end].reshape(size) for name, (begin, end, size) in zip(NAMES, offsets(shape), strict=True)
    }
    for name in FLOATS:
        views[name] = as_float(views[name])
    return Fields(**views, tables=buffer[words(shape) :])


@dataclass(frozen=True, slots=True)
class Plan:
    """What attention has to do for a batch, and the shape that takes."""

    shape: Shape
    parts: Ints  # [P, 8]
    tiles: Ints  # [Q, 5]


def plan(batch: Batch, tile_tokens: int, pad: Callable[[Shape], Shape]) -> Plan:
    """What the batch needs, in the shape that `pad` makes of its own."""
    single = np.diff(batch.row_start) == 1
    rows = np.flatnonzero(single).astype(np.int32)
    parts = cut_contexts(batch.row_start[rows], rows, batch.positions[batch.row_start[rows]] + 1)
    tiles = tiles_of(batch, np.flatnonzero(~single), tile_tokens)
    shape = Shape(len(batch.tokens), len(batch.sampled), len(rows), len(parts), len(tiles))
    return Plan(pad(shape), parts, tiles)


def cut_contexts(tokens: Ints, rows: Ints, lengths: Ints) -> Ints:
    """Parts of about the same size, at most SPARE_PARTS more than rows: the last of a context takes a rest that would
    be less than half of one. The longest contexts come first, so that none is left for the end."""
    longest = np.argsort(-lengths, kind="stable")
    tokens, rows, lengths = tokens[longest], rows[longest], lengths[longest]
    size = max(SHORTEST_PART, -(-int(lengths.sum()) // SPARE_PARTS))
    size = -(-size // SHORTEST_PART) * SHORTEST_PART
    counts = np.maximum((lengths + size // 2) // size, 1)  # [D]
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(rows)), counts)  # [P]
    index = np.arange(len(owner)) - first[owner]
    begin = index * size
    end = np.where(index == counts[owner] - 1, lengths[owner], begin + size)
    columns = [tokens[owner], rows[owner], begin, end, lengths[owner], counts[owner], first[owner], 0 * owner]
    return np.stack(columns, axis=1).astype(np.int32)


def tiles_of(batch: Batch, rows: Any, tile_tokens: int) -> Ints:
    """Runs of at most `tile_tokens` tokens; the longest contexts come first, so that none is left for the end."""
    tiles = [
        (token, row, batch.positions[token], min(tile_tokens, last - token), batch.positions[last - 1] + 1)
        for row in rows.tolist()
        for token, last in _runs(batch, row, tile_tokens)
    ]
    tiles.sort(key=lambda tile: -tile[2])
    return np.array(tiles, np.int32).reshape(-1, 5)


def _runs(batch: Batch, row: int, tile_tokens: int) -> Iterator[tuple[int, int]]:
    first, last = int(batch.row_start[row]), int(batch.row_start[row + 1])
    return ((token, last) for token in range(first, last, tile_tokens))


def fill(buffer: Ints, batch: Batch, plan: Plan, block_size: int, scratch_block: int, scratch_slot: int) -> int:
    """Writes the batch into a host buffer; returns how many words are to be sent."""
    into = fields(buffer, plan.shape, as_floats)
    counts = np.diff(batch.row_start)
    owner = np.repeat(np.arange(len(counts)), counts)  # [T]
    tables = batch.tables[0]
    block = tables[owner, batch.positions // block_size]
    into.header[0] = tables.shape[1]
    put(into.tokens, batch.tokens, 0)
    put(into.positions, batch.positions, 0)
    put(into.token_slots, batch.slots[owner], scratch_slot)
    put(into.places, block * block_size + batch.positions % block_size, scratch_block * block_size)
    put(into.parts, plan.parts, -1)
    put(into.tiles, plan.tiles, -1)
    fill_sampling(into, batch, scratch_slot)
    begin = words(plan.shape)
    end = begin + int(tables.size)
    buffer[begin:end].reshape(tables.shape)[:] = tables
    return end


def fill_sampling(into: Fields, batch: Batch, scratch_slot: int) -> None:
    rows = batch.sample
    put(into.sampled, batch.sampled, 0)
    put(into.target, rows.target, 0)
    put(into.sample_slots, slots_to_keep(batch, scratch_slot), scratch_slot)
    put(into.temperature, rows.temperature, 0)
    put(into.top_p, rows.top_p, 1)
    put(into.top_k, rows.top_k, 0)
    put(into.min_p, rows.min_p, 0)
    put(into.seeds, rows.seed.view(np.int32).reshape(-1, 2), 0)


def slots_to_keep(batch: Batch, scratch_slot: int) -> Ints:
    """For each sampled position, the slot whose next token it is: that of its row, for the last one that the row
    samples; for all others none."""
    slots = np.full(len(batch.sampled), scratch_slot, np.int32)
    last = batch.sample_start[1:] - 1
    rows = np.flatnonzero(np.diff(batch.sample_start) > 0)
    slots[last[rows]] = batch.slots[rows]
    slots[batch.sample.target >= 0] = scratch_slot
    return slots


def put(into: Any, values: Any, padding: int) -> None:
    into[: len(values)] = values
    into[len(values) :] = padding


def as_floats(view: Ints) -> Floats:
    return view.view(np.float32)

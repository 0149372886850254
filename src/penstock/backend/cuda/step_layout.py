"""Lays out a step's numbers for the device: one buffer of 32-bit words, sent with one copy.

The buffer consists of sections with fields. A graph reads each field at an offset that depends only on the step's
shape. Block tables come last, because their width changes from step to step; it is a number like the others. Row r of a
step has a block table for each KV layer group, at row r * groups + g of the tables. Splits and tiles, which name such
rows, exist once for each group, so that kernels need not know about groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from penstock.backend.base import Batch, Floats, Ints
from penstock.backend.cuda.contexts import CONTEXT_COLUMNS
from penstock.backend.cuda.inputs import ROW, AttentionPlan, Shape
from penstock.backend.cuda.shared_prefixes import shared_places

ALIGNMENT = 4  # words: kernels load 16 bytes at a time


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """Holds views of the buffer, on the host or the device. Places, splits and tiles belong to one layer group."""

    header: Any  # [4] the tables' width
    tokens: Any  # [T]
    positions: Any  # [T]
    token_slots: Any  # [T]
    places: Any  # [T] where a token's KV goes in the cache, counted in tokens
    splits: Any  # [P, 8] see decode_attention
    tiles: Any  # [Q, 5] see prefill_attention
    sampled: Any  # [S]
    target: Any  # [S]
    sample_slots: Any  # [S] where the sampled token is kept for the next step
    temperature: Any  # [S] float32
    top_p: Any  # [S] float32
    top_k: Any  # [S]
    min_p: Any  # [S] float32
    seeds: Any  # [S, 2] low word, high word
    adapter_tiles: Any  # [D, 4] see low_rank
    adapter_order: Any  # [T], or [0] without adapters
    adapter_slots: Any  # [T] of each token, or [0] without adapters
    sampled_adapters: Any  # [S] adapter slots, or [0] without adapters
    shared_splits: Any  # [U, 8] see shared_prefix_attention
    shared_tokens: Any  # [decodes], or [0] without shared prefixes
    shared_places: Any  # [T, 4] see `shared_places`, or [0, 4]
    expanded: Any  # [B, 3] see contexts, or [0, 3]
    tile_contexts: Any  # [Q] where the context of each tile begins among those that are expanded, or [0]
    tables: Any  # [rows * groups * width]
    groups: tuple[DeviceInputs, ...] = ()  # the same for each layer group; empty: there is one
    run: int = 0  # above 0, the step's KV is stored before anything attends: see Shape
    decodes: int = 0  # tokens that come first and attend as decoding rows do, with padding, where MLA expands contexts

    def of(self, group: int) -> DeviceInputs:
        return self.groups[group] if self.groups else self


class StepNumbers(NamedTuple):
    """Holds the input of sections. Rows that only pad write to the scratch block and slot."""

    batch: Batch
    plan: AttentionPlan
    block_size: int
    scratch_block: int
    scratch_slot: int


class Field(NamedTuple):
    """Declares a field of the buffer."""

    name: str
    size: Callable[[Shape], tuple[int, ...]]
    by_group: bool = False  # each KV layer group has its own
    floats: bool = False  # its words are float32


class Section(NamedTuple):
    """Declares fields that belong together, and writes them."""

    fields: tuple[Field, ...]
    fill: Callable[[DeviceInputs, StepNumbers], None]


def per_token(shape: Shape) -> tuple[int]:
    return (shape.tokens,)


def per_sample(shape: Shape) -> tuple[int]:
    return (shape.sampled,)


def fill_tokens(into: DeviceInputs, step: StepNumbers) -> None:
    batch, size = step.batch, step.block_size
    rows, width = batch.tables.shape[1:]
    owner = np.repeat(np.arange(rows), np.diff(batch.row_start))  # [T]
    into.header[0] = width
    put(into.tokens, batch.tokens, 0)
    put(into.positions, batch.positions, 0)
    put(into.token_slots, batch.slots[owner], step.scratch_slot)
    entry, offset = batch.positions // size, batch.positions % size
    for group, table in enumerate(batch.tables):
        put(into.of(group).places, table[owner, entry] * size + offset, step.scratch_block * size)


def fill_splits(into: DeviceInputs, step: StepNumbers) -> None:
    for group in range(len(step.batch.tables)):
        put_rows(into.of(group).splits, step.plan.splits, group, step.batch)


def fill_tiles(into: DeviceInputs, step: StepNumbers) -> None:
    for group in range(len(step.batch.tables)):
        put_rows(into.of(group).tiles, step.plan.tiles, group, step.batch)


def fill_sampling(into: DeviceInputs, step: StepNumbers) -> None:
    batch, rows = step.batch, step.batch.sample
    put(into.sampled, batch.sampled, 0)
    put(into.target, rows.target, 0)
    put(into.sample_slots, slots_to_keep(batch, step.scratch_slot), step.scratch_slot)
    put(into.temperature, rows.temperature, 0)
    put(into.top_p, rows.top_p, 1)
    put(into.top_k, rows.top_k, 0)
    put(into.min_p, rows.min_p, 0)
    put(into.seeds, rows.seed.view(np.int32).reshape(-1, 2), 0)


def fill_adapters(into: DeviceInputs, step: StepNumbers) -> None:
    adapters = step.plan.adapters
    put(into.adapter_tiles, adapters.tiles, -1)
    put(into.adapter_order, adapters.order, 0)
    put(into.adapter_slots, adapters.slots, -1)
    put(into.sampled_adapters, adapters.sampled, -1)


def fill_prefixes(into: DeviceInputs, step: StepNumbers) -> None:
    plan = step.plan
    put(into.shared_splits, plan.shared_splits, -1)
    if plan.shared is not None:
        put(into.shared_tokens, plan.shared.tokens, 0)
        places = shared_places(plan.shared_splits, plan.shared.tokens, len(step.batch.tokens))
        put(into.shared_places, places, 0)


def fill_contexts(into: DeviceInputs, step: StepNumbers) -> None:
    contexts = step.plan.contexts
    put(into.expanded, contexts.blocks, -1)
    if contexts.room:
        put(into.tile_contexts, contexts.starts[step.plan.tiles[:, ROW]], 0)


TOKENS = Section(
    (
        Field("header", lambda shape: (4,)),
        Field("tokens", per_token),
        Field("positions", per_token),
        Field("token_slots", per_token),
        Field("places", per_token, by_group=True),
    ),
    fill_tokens,
)
SPLITS = Section((Field("splits", lambda shape: (shape.splits, 8), by_group=True),), fill_splits)
TILES = Section((Field("tiles", lambda shape: (shape.tiles, 5), by_group=True),), fill_tiles)
SAMPLING = Section(
    (
        Field("sampled", per_sample),
        Field("target", per_sample),
        Field("sample_slots", per_sample),
        Field("temperature", per_sample, floats=True),
        Field("top_p", per_sample, floats=True),
        Field("top_k", per_sample),
        Field("min_p", per_sample, floats=True),
        Field("seeds", lambda shape: (shape.sampled, 2)),
    ),
    fill_sampling,
)
ADAPTERS = Section(
    (
        Field("adapter_tiles", lambda shape: (shape.adapter_tiles, 4)),
        Field("adapter_order", lambda shape: (shape.tokens if shape.adapter_tiles else 0,)),
        Field("adapter_slots", lambda shape: (shape.tokens if shape.adapter_tiles else 0,)),
        Field("sampled_adapters", lambda shape: (shape.sampled if shape.adapter_tiles else 0,)),
    ),
    fill_adapters,
)
PREFIXES = Section(
    (
        Field("shared_splits", lambda shape: (shape.shared, 8)),
        Field("shared_tokens", lambda shape: (shape.decodes if shape.shared else 0,)),
        Field("shared_places", lambda shape: (shape.tokens if shape.shared else 0, 4)),
    ),
    fill_prefixes,
)
CONTEXTS = Section(
    (
        Field("expanded", lambda shape: (shape.expanded, CONTEXT_COLUMNS)),
        Field("tile_contexts", lambda shape: (shape.tiles if shape.expanded else 0,)),
    ),
    fill_contexts,
)
SECTIONS = (TOKENS, SPLITS, TILES, SAMPLING, ADAPTERS, PREFIXES, CONTEXTS)
FIELDS = tuple(field for section in SECTIONS for field in section.fields)


@lru_cache(maxsize=512)
def offsets(shape: Shape, groups: int = 1) -> tuple[int, ...]:
    found = [0]
    for field in FIELDS:
        count = prod(field.size(shape))
        found.append(found[-1] + (groups * aligned(count) if field.by_group and groups > 1 else aligned(count)))
    return tuple(found)


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def words(shape: Shape, groups: int = 1) -> int:
    return offsets(shape, groups)[-1]


def device_inputs(buffer: Any, shape: Shape, as_float: Callable[[Any], Any], groups: int = 1) -> DeviceInputs:
    """Returns the fields of a flat buffer of NumPy or torch for the first layer group, with all groups in `groups`."""

    def views(group: int) -> dict[str, Any]:
        found = {}
        for field, begin in zip(FIELDS, offsets(shape, groups), strict=False):
            size = field.size(shape)
            if field.by_group:
                begin += group * aligned(prod(size))
            view = buffer[begin : begin + prod(size)].reshape(size)
            found[field.name] = as_float(view) if field.floats else view
        return found

    tables = buffer[words(shape, groups) :]
    each = tuple(
        DeviceInputs(**views(group), tables=tables, run=shape.run, decodes=shape.decodes) for group in range(groups)
    )
    return each[0] if groups == 1 else replace(each[0], groups=each)


def fill(into: DeviceInputs, step: StepNumbers) -> int:
    """Writes a step into the fields of a host buffer; returns how many words of it are to be sent."""
    for section in SECTIONS:
        section.fill(into, step)
    groups, rows, width = step.batch.tables.shape
    count = int(step.batch.tables.size)
    into.tables[:count].reshape(rows, groups, width)[:] = step.batch.tables.transpose(1, 0, 2)
    return words(step.plan.shape, groups) + count


def slots_to_keep(batch: Batch, scratch_slot: int) -> Ints:
    """Returns the slot that keeps each sampled token: the row's, for the row's last sampled position, else the scratch
    slot."""
    slots = np.full(len(batch.sampled), scratch_slot, np.int32)
    last = batch.sample_start[1:] - 1
    rows = np.flatnonzero(np.diff(batch.sample_start) > 0)
    slots[last[rows]] = batch.slots[rows]
    slots[batch.sample.target >= 0] = scratch_slot
    return slots


def put_rows(into: Any, values: Ints, group: int, batch: Batch) -> None:
    put(into, values, -1)
    if len(batch.tables) > 1:
        into[: len(values), ROW] = values[:, ROW] * len(batch.tables) + group


def put(into: Any, values: Any, padding: int) -> None:
    into[: len(values)] = values
    into[len(values) :] = padding


def as_floats(view: Ints) -> Floats:
    return view.view(np.float32)

"""Divides a step's tokens into tiles that have one adapter each. It imports no torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.backend.base import Batch, Ints

DECODE_ROWS, PROMPT_ROWS = 16, 64  # most tokens in a tile of a step without prompts, and with some


class AdapterTiles(NamedTuple):
    """Holds the tiles of a step's tokens. Tokens without an adapter have tiles too; nothing has any where no row of the
    step has an adapter."""

    tiles: Ints  # [D, 4] slot, first place in `order`, tokens; the last column has each slot in use once, then -1
    order: Ints  # [T] tokens, those with one adapter side by side
    slots: Ints  # [T] the slot of each token
    sampled: Ints  # [S] the slot of each sampled position


NO_TILES = AdapterTiles(np.zeros((0, 4), np.int32), *[np.zeros(0, np.int32)] * 3)


def adapter_tiles(batch: Batch, size: int) -> AdapterTiles:
    if not len(batch.adapters) or batch.adapters.max() < 0:
        return NO_TILES
    slots = batch.adapter_rows
    order = np.argsort(slots, kind="stable")
    found, first, counts = np.unique(slots[order], return_index=True, return_counts=True)
    each = -(-counts // size)
    owner = np.repeat(np.arange(len(found)), each)  # [D]
    begin = (np.arange(len(owner)) - (np.cumsum(each) - each)[owner]) * size
    used = found[found >= 0]
    in_use = np.pad(used, (0, len(owner) - len(used)), constant_values=-1)
    columns = [found[owner], first[owner] + begin, np.minimum(counts[owner] - begin, size), in_use]
    tiles = np.stack(columns, axis=1).astype(np.int32)
    return AdapterTiles(tiles, order.astype(np.int32), slots, slots[batch.sampled])

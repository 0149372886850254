"""Finds prefixes that several decoding rows have in common, so that attention reads these once in a step.

Rows that share a prefix share its blocks. Their newest tokens attend to it together, in tiles of some tokens each, and
what they find there is joined with what each finds in the rest of its own context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from penstock.backend.base import Ints

LEAST_SPARED = 65536  # positions that reading a prefix once must spare in a step: another launch has its price
LATER = 8  # times less that it must spare for more prefixes in the same step
PROBED = 16  # depths at which tables are compared
QUERIES = 64  # pairs of token and head of a tile, at most
MOST_TOKENS = 16  # per tile
TILES = 64  # most tiles of a step's prefixes
SPARE_SPLITS = 32  # beyond one for each tile
SPLITS = TILES + SPARE_SPLITS


class Sharing(NamedTuple):
    """Says how a program's rows may share prefixes."""

    block_size: int
    tile_tokens: int


def tile_tokens(group: int) -> int:
    return min(QUERIES // group, MOST_TOKENS)


class SharedPrefixes(NamedTuple):
    """Says which tokens attend together to what. Tiles are runs of `tokens`."""

    tokens: Ints  # [M] tile by tile
    first: Ints  # [tiles] where each tile begins in `tokens`
    rows: Ints  # [tiles] a row whose table begins with the prefix
    lengths: Ints  # [tiles] positions of the prefix
    sizes: Ints  # [tiles] tokens of the tile
    starts: Ints  # [rows] where the rest of each row's context begins


def find_shared_prefixes(tables: Ints, tokens: Ints, lengths: Ints, sharing: Sharing) -> SharedPrefixes | None:
    """Returns the prefixes that rows with these block tables [R, width], newest tokens and contexts have in common;
    None if reading them once would not pay."""
    if len(tables) < 2 or int(lengths.sum()) < LEAST_SPARED:
        return None
    groups = prefix_groups(tables, (lengths - 1) // sharing.block_size, LEAST_SPARED // sharing.block_size)
    first, rows, shared, sizes = list[int](), list[int](), list[int](), list[int]()
    members, starts, at = list[Ints](), np.zeros(len(tables), np.int32), 0
    for group, blocks in groups:
        tiles = range(0, len(group), sharing.tile_tokens)
        if len(first) + len(tiles) > TILES:
            continue
        first += [at + begin for begin in tiles]
        sizes += [min(sharing.tile_tokens, len(group) - begin) for begin in tiles]
        rows += [int(group[0])] * len(tiles)
        shared += [blocks * sharing.block_size] * len(tiles)
        members.append(tokens[group])
        starts[group] = blocks * sharing.block_size
        at += len(group)
    if not first:
        return None
    tiled, owners, prefixes, counts = (np.array(column, np.int32) for column in (first, rows, shared, sizes))
    return SharedPrefixes(np.concatenate(members), tiled, owners, prefixes, counts, starts)


def prefix_groups(tables: Ints, full: Ints, least: int) -> Iterator[tuple[Any, int]]:
    """Yields rows that begin with the same blocks, and the number of these blocks. `full` counts each row's computed
    blocks. Nothing is yielded if fewer than `least` blocks would be spared at first.

    A block has one place in one prefix, so rows with the same block also share all blocks before it. Rows are compared
    at the depth that spares most; rows without a group are compared again.
    """
    left = np.arange(len(tables))
    while len(left) > 1:
        found = np.zeros(len(left), bool)
        for group in groups_at_best_depth(tables[left], full[left], least):
            found[group] = True
            rows = left[group]
            both = int(full[rows].min())
            common = (tables[rows, :both] == tables[rows[0], :both]).all(0)
            if length := both if common.all() else int(common.argmin()):
                yield rows, length
        if not found.any():
            return
        left, least = left[~found], least // LATER


def groups_at_best_depth(tables: Ints, full: Ints, least: int) -> list[Any]:
    """Returns the rows that have the same block at the depth at which that spares most; none if it spares less than
    `least` blocks. The largest groups come first."""
    depths = np.unique(np.linspace(1, max(int(full.max()), 1), PROBED).astype(np.int64))
    own = -1 - np.arange(len(tables))[:, None]
    blocks = np.where(full[:, None] >= depths, tables[:, depths - 1], own)  # [R, depths]
    ordered = np.sort(blocks, axis=0)
    spared = (ordered[1:] == ordered[:-1]).sum(0) * depths
    best = int(spared.argmax())
    if spared[best] < max(least, 1):
        return []
    _, group, counts = np.unique(blocks[:, best], return_inverse=True, return_counts=True)
    return [np.flatnonzero(group == number) for number in np.argsort(-counts, kind="stable") if counts[number] > 1]


def shared_places(splits: Ints, tokens: Ints, count: int) -> Ints:
    """Returns for each of `count` tokens of a step where others have attended for it: the first split of its tile, how
    many splits that has, and its own place in the tile; all 0 for a token that attends by itself."""
    places = np.zeros((count, 4), np.int32)
    for first, *_, many, split, size in splits[splits[:, 2] == 0].tolist():
        places[tokens[first : first + size], :3] = np.stack(
            [np.full(size, split), np.full(size, many), np.arange(size)], axis=1
        )
    return places

"""Packs the matrices of an adapter in the layout that kernels/low_rank.py reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.backend.base import Floats, Ints
from penstock.backend.cuda.kernels.low_rank import BLOCK, COLUMNS, RANKS
from penstock.model.low_rank import LowRankPart, LowRankUpdate


class UpdateSizes(NamedTuple):
    """Says how many programs the update of one weight takes."""

    chunks: int  # all chunks of ranks
    blocks: int  # blocks of rows of B
    aligned: bool  # all blocks begin and end at multiples of 16
    depth: int  # the most chunks that one block has
    tiled: bool  # block i has rows i * COLUMNS to (i + 1) * COLUMNS: of each half, where the weight is gated


class LowRankSegment(NamedTuple):
    """Is an update of consecutive rows of a weight."""

    first: int
    chunk: int  # the first chunk of its ranks in h
    b: Floats  # [rows, chunks * RANKS]

    @property
    def chunks(self) -> int:
        return int(self.b.shape[1]) // RANKS

    @property
    def padded_rows(self) -> int:
        return padded(len(self.b), COLUMNS)

    def blocks(self, at: int) -> Ints:
        """Returns the first five words of each of its blocks, the first of which lies at place `at` of B."""
        begin = np.arange(0, len(self.b), COLUMNS)
        columns = np.minimum(len(self.b) - begin, COLUMNS)
        same = np.full_like(begin, self.chunk), np.full_like(begin, self.chunks)
        return np.stack([self.first + begin, columns, *same, at + begin * self.chunks], axis=1).astype(np.int32)

    def write(self, into: Any) -> None:
        whole = np.zeros((self.padded_rows, self.b.shape[1]), np.float32)
        whole[: len(self.b)] = self.b
        blocks = whole.reshape(self.padded_rows // COLUMNS, COLUMNS, self.chunks, RANKS).swapaxes(1, 2)
        into.view(blocks.shape).copy_(torch.from_numpy(blocks))


class PackedUpdate(NamedTuple):
    """Holds how an adapter changes one weight: the parts of A one below the other, and B in blocks."""

    a: Sequence[Floats]  # each [rank, width]
    segments: Sequence[LowRankSegment]
    blocks: Ints  # [blocks, BLOCK]
    b_at: int  # how many values A takes

    @property
    def values(self) -> int:
        return self.b_at + sum(segment.padded_rows * segment.chunks * RANKS for segment in self.segments)

    @property
    def sizes(self) -> UpdateSizes:
        chunks, blocks = sum(map(chunks_of, self.a)), self.blocks
        tiled = bool((blocks[:, 0] == np.arange(len(blocks)) * COLUMNS).all())
        depth = max(segment.chunks for segment in self.segments)
        return UpdateSizes(chunks, len(blocks), not (blocks[:, :2] % 16).any(), depth, tiled)

    def write(self, into: Any) -> None:
        lines, first = into[: self.b_at].view(self.sizes.chunks * RANKS, -1), 0
        for part in self.a:
            lines[first : first + len(part)].copy_(torch.from_numpy(np.ascontiguousarray(part)))
            first += chunks_of(part) * RANKS
        at = self.b_at
        for segment in self.segments:
            size = segment.padded_rows * segment.chunks * RANKS
            segment.write(into[at : at + size])
            at += size


def pack_update(update: LowRankUpdate, gated: bool) -> PackedUpdate:
    """Packs what an adapter changes about one weight. Where the weight is gated, a block has columns of both halves."""
    parts = update.parts
    chunks = [chunks_of(part.a) for part in parts]
    starts = [0, *accumulate(chunks)]
    if gated:
        half = update.weight.rows // 2
        segments = [joined(parts, starts, first, half) for first in (0, half)]
    else:
        ends = {0, *(part.first for part in parts), *(part.first + len(part.b) for part in parts)}
        segments = [joined(parts, starts, first, end - first) for first, end in pairwise(sorted(ends))]
    places = [0, *accumulate(segment.padded_rows * segment.chunks for segment in segments)]
    tables = [segment.blocks(place) for segment, place in zip(segments, places[:-1], strict=True)]
    blocks = np.concatenate([tables[0], tables[1][:, 2:]], axis=1) if gated else np.concatenate(tables)
    blocks = np.pad(blocks, ((0, 0), (0, BLOCK - blocks.shape[1])))
    a = [part.a for part in parts]
    return PackedUpdate(a, segments, blocks, sum(chunks) * RANKS * a[0].shape[1])


def joined(parts: Sequence[LowRankPart], starts: Sequence[int], first: int, rows: int) -> LowRankSegment:
    """Returns the update of rows of a weight, from `first` on. The ranks of its parts begin at chunks `starts` of h."""
    touching = [i for i, part in enumerate(parts) if part.first < first + rows and first < part.first + len(part.b)]
    if not touching:
        return LowRankSegment(first, 0, np.zeros((rows, 0), np.float32))
    begin, end = starts[touching[0]], starts[touching[-1] + 1]
    b = np.zeros((rows, (end - begin) * RANKS), np.float32)
    for i in touching:
        part, column = parts[i], (starts[i] - begin) * RANKS
        top, bottom = max(part.first, first), min(part.first + len(part.b), first + rows)
        some = part.b[top - part.first : bottom - part.first]
        b[top - first : bottom - first, column : column + some.shape[1]] = some
    return LowRankSegment(first, begin, b)


def chunks_of(a: Floats) -> int:
    return -(-len(a) // RANKS)


def padded(value: int, to: int) -> int:
    return -(-value // to) * to

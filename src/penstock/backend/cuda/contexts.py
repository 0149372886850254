"""Places the contexts of a step's prompts one behind the other, for kernels that attend to another form of them.

Each context begins at a multiple of BLOCK positions. MLA projects latents to keys and values (mla_expansion.py); a KV
cache of 8 bits is written out in 16 (kv_expansion.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.backend.base import Batch, Ints

BLOCK = 128  # positions that a program expands
MOST_BLOCKS = 4096  # per step; longer contexts are not expanded
CONTEXT_COLUMNS = 3  # row of tables, first position, number of positions of a block


class ExpandedContexts(NamedTuple):
    """Says which contexts a step expands."""

    blocks: Ints  # [B, CONTEXT_COLUMNS]
    starts: Ints  # [rows] where the context of each row begins; 0 for rows without prompts
    room: int  # blocks that the step has room for


NO_CONTEXTS = ExpandedContexts(np.zeros((0, CONTEXT_COLUMNS), np.int32), np.zeros(0, np.int32), 0)


class PromptSizes(NamedTuple):
    """Holds the sizes of a step's rows with prompts."""

    counts: Ints  # tokens
    lengths: Ints  # positions that they reach

    @classmethod
    def of(cls, batch: Batch, rows: Ints) -> PromptSizes:
        ends = batch.row_start[rows + 1]
        return cls((ends - batch.row_start[rows]).astype(np.int64), (batch.positions[ends - 1] + 1).astype(np.int64))

    @classmethod
    def of_one(cls, tokens: int) -> PromptSizes:
        return cls(np.array([tokens], np.int64), np.array([tokens], np.int64))

    @property
    def pairs(self) -> int:
        """Returns how many pairs there are of a token and a position that it sees."""
        counts, lengths = self
        return int((counts * (lengths - counts) + counts * (counts + 1) // 2).sum())

    @property
    def blocks(self) -> Ints:
        return -(-self.lengths // BLOCK)


def place_contexts(batch: Batch, rows: Ints, sizes: PromptSizes, room: int) -> ExpandedContexts:
    blocks = sizes.blocks
    first = np.cumsum(blocks) - blocks
    starts = np.zeros(len(batch.row_start) - 1, np.int32)
    starts[rows] = first * BLOCK
    owner = np.repeat(np.arange(len(rows)), blocks)
    begin = (np.arange(len(owner)) - first[owner]) * BLOCK
    columns = rows[owner], begin, np.minimum(sizes.lengths[owner] - begin, BLOCK)
    return ExpandedContexts(np.stack(columns, axis=1).astype(np.int32), starts, room)

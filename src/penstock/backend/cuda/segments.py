"""Plans attention so that a token's sums depend only on its own context (`--deterministic`). It imports no torch.

A context is divided into segments at multiples of SEGMENT positions, and a token's results for them are joined in order
(kernels/segmented_attention.py), whichever program computed them. Where a step has few runs of tokens, the longest
contexts are split among programs of one segment each, the last of which joins them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.backend.base import Batch, Ints
from penstock.backend.cuda.adapter_tiles import DECODE_ROWS, adapter_tiles
from penstock.backend.cuda.inputs import NO_SPLITS, AttentionPlan, Shape, runs_of

SEGMENT = 512  # positions
MOST_SPLITS = 128  # per step, unless it has more runs


def plan_segments(batch: Batch, run: int, pad: Callable[[Shape], Shape], *, whole_rows: bool = False) -> AttentionPlan:
    """Divides all rows of a batch, whether they are prompts, answers or drafts, into runs of at most `run` tokens, and
    their contexts into splits. A token's context ends with its run, or with its row if tokens see `whole_rows`. `pad`
    makes the step's shape of the batch's own."""
    rows = np.flatnonzero(np.diff(batch.row_start) > 0).astype(np.int32)
    first, owners, sizes = runs_of(batch, rows, run)
    ends = batch.row_start[owners + 1] if whole_rows else first + sizes
    splits = split_at_segments(first, owners, batch.positions[ends - 1] + 1, sizes)
    adapters = adapter_tiles(batch, DECODE_ROWS)
    shape = pad(
        Shape(
            len(batch.tokens),
            len(batch.sampled),
            len(rows),
            len(splits),
            0,
            len(adapters.tiles),
            run=run,
            segmented=True,
        )
    )
    return AttentionPlan(shape, splits, np.zeros((0, 5), np.int32), adapters, None, NO_SPLITS)


def split_at_segments(tokens: Ints, rows: Ints, lengths: Ints, sizes: Ints) -> Ints:
    """Returns splits as `inputs.split_contexts` does: of one segment each, or of a whole context. The longest contexts
    come first, and are split while the step has at most MOST_SPLITS."""
    longest = np.argsort(-lengths, kind="stable")
    tokens, rows, lengths, sizes = (each[longest] for each in (tokens, rows, lengths, sizes))
    counts = -(-lengths // SEGMENT)
    counts[np.cumsum(counts - 1) > max(MOST_SPLITS - len(rows), 0)] = 1
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(rows)), counts)  # [P]
    index = np.arange(len(owner)) - first[owner]
    begin = index * SEGMENT
    end = np.where(index == counts[owner] - 1, lengths[owner], begin + SEGMENT)
    columns = [tokens[owner], rows[owner], begin, end, lengths[owner], counts[owner], first[owner], sizes[owner]]
    return np.stack(columns, axis=1).astype(np.int32)


def most_splits(tokens: int, rows: int, run: int) -> int:
    return max(min(tokens, tokens // max(run, 1) + rows), MOST_SPLITS)

"""Generates steps that chunk, interleave and scatter prompts at random: inputs for tests of any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.backend.base import Batch
from penstock.backend.batches import Chunk


def random_steps(
    rng: np.random.Generator, prompts: Sequence[Sequence[int]], block_size: int, longest: int = 16
) -> list[list[Chunk]]:
    """Returns steps that compute every prompt in chunks of random lengths, interleaved at random, in blocks scattered
    over a cache that holds them all exactly (see `blocks_for`)."""
    sizes = [-(-len(prompt) // block_size) for prompt in prompts]
    tables = np.split(rng.permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    done = [0] * len(prompts)
    steps = []
    while sum(done) < sum(map(len, prompts)):
        counts = [min(int(rng.integers(longest + 1)), len(p) - at) for p, at in zip(prompts, done, strict=True)]
        chunks = [
            Chunk(prompts[i][done[i] : done[i] + count], done[i], tables[i].tolist(), slot=i)
            for i, count in enumerate(counts)
            if count
        ]
        done = [at + count for at, count in zip(done, counts, strict=True)]
        steps += [chunks] if chunks else []
    return steps


def blocks_for(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    return sum(-(-len(prompt) // block_size) for prompt in prompts)


def with_groups(batch: Batch, windows: Sequence[int], block_size: int, behind: int = 0) -> Batch:
    """Returns the batch with a block table for each of G KV groups: where it has block b, group g has block b * G + g,
    and `behind` where that lies behind the window of all the row's positions."""
    tables = np.stack([batch.tables[0] * len(windows) + group for group in range(len(windows))])
    first = batch.positions[batch.row_start[:-1]]
    for table, window in zip(tables, windows, strict=True):
        needed = np.maximum(first - window + 1, 0) // block_size if window else np.zeros_like(first)
        table[np.arange(table.shape[1]) < needed[:, None]] = behind
    return replace(batch, tables=tables)

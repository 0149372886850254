"""Batches written by hand, where there is no scheduler: for tests, cases and looking at logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.backend.base import Batch, SampleRows


class Chunk(NamedTuple):
    """Tokens of one sequence from position `start` on, and the sequence's whole block table."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]
    slot: int = 0
    sample: int | None = None  # how many of its last positions; None: all


def greedy_batch(chunks: Sequence[Chunk], step: int = 0) -> Batch:
    """A row for each chunk, its wanted positions sampled greedily."""
    counts = [len(chunk.tokens) for chunk in chunks]
    wanted = [count if chunk.sample is None else chunk.sample for chunk, count in zip(chunks, counts, strict=True)]
    ends = np.cumsum(counts, dtype=np.int32).tolist()
    tables = np.zeros((len(chunks), max((len(chunk.table) for chunk in chunks), default=0)), np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.table)] = chunk.table
    return Batch(
        step=step,
        tokens=np.array([token for chunk in chunks for token in chunk.tokens], np.int32),
        positions=np.array([chunk.start + i for chunk in chunks for i in range(len(chunk.tokens))], np.int32),
        row_start=np.array([0, *ends], np.int32),
        slots=np.array([chunk.slot for chunk in chunks], np.int32),
        tables=tables[None],
        sampled=np.array([i for end, n in zip(ends, wanted, strict=True) for i in range(end - n, end)], np.int32),
        sample_start=np.cumsum([0, *wanted], dtype=np.int32),
        sample=greedy_rows(sum(wanted)),
    )


def with_groups(batch: Batch, windows: Sequence[int], block_size: int, behind: int = 0) -> Batch:
    """Returns the batch with a block table for each of G KV groups: where it has block b, group g has block b * G + g,
    and `behind` where that lies behind the window of all the row's positions."""
    tables = np.stack([batch.tables[0] * len(windows) + group for group in range(len(windows))])
    first = batch.positions[batch.row_start[:-1]]
    for table, window in zip(tables, windows, strict=True):
        needed = np.maximum(first - window + 1, 0) // block_size if window else np.zeros_like(first)
        table[np.arange(table.shape[1]) < needed[:, None]] = behind
    return replace(batch, tables=tables)


def random_steps(
    rng: np.random.Generator, prompts: Sequence[Sequence[int]], block_size: int, longest: int = 16
) -> list[list[Chunk]]:
    """Computes every prompt in chunks of random lengths, interleaved at random, in blocks scattered over a cache that
    holds them all exactly (see `blocks_for`)."""
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


def greedy_rows(count: int) -> SampleRows:
    return SampleRows(
        target=np.full(count, -1, np.int32),
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint64),
        logprobs=np.full(count, -1, np.int32),
        edits=(None,) * count,
    )

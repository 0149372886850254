"""Makes batches by hand, for code without a scheduler: calibration, evaluation, warm-up and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.backend.base import Batch, SampleRows


class Chunk(NamedTuple):
    """Gives tokens of one sequence from position `start` on, and the sequence's whole block table."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]
    slot: int = 0
    sample: int | None = None  # how many of its last positions; None: all


def greedy_batch(chunks: Sequence[Chunk], step: int = 0) -> Batch:
    """Returns a batch with a row for each chunk, its wanted positions sampled greedily. There is one KV layer group."""
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


def greedy_rows(count: int) -> SampleRows:
    return SampleRows(
        target=np.full(count, -1, np.int32),
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint64),
        logprobs=np.full(count, -1, np.int32),
    )

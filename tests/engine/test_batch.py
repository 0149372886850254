"""Batches have a block table for each KV layer group, and the fake notices what is wrong in any of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.backend.base import Batch
from penstock.backend.fake import FakeBackend, continuation
from penstock.core import Sequence
from penstock.engine.batch import Batcher
from penstock.engine.request_record import RequestRecord
from penstock.types import Limits, Request, Row, SamplingParams, StepPlan, TableUpdate

WINDOWS = (0, 5, 3)
LIMITS = Limits(max_len=32, max_rows=4, step_tokens=16, block_size=4, num_blocks=40, vocab=1000, windows=WINDOWS)
PROMPT = tuple(range(3, 13))
TABLES = ((7, 1, 30, 4), (2, 9, 11, 5), (3, 8, 6, 12))  # of each group


def batch_of(*plans: StepPlan) -> Batch:
    """Returns what the last of the plans becomes, for one sequence."""
    batcher = Batcher(LIMITS)
    for plan in plans:
        batcher.apply(plan)
    request = Request(1, PROMPT, SamplingParams(), 4)
    return batcher.build(plans[-1], {1: Sequence(1, PROMPT, 4)}, {1: RequestRecord(request)})


def grown(first: int, last: int) -> tuple[TableUpdate, ...]:
    return tuple(TableUpdate(1, first, table[first:last], group) for group, table in enumerate(TABLES))


def test_a_table_for_each_group() -> None:
    first = StepPlan(1, (Row(1, 0, 6, 0),), grown(0, 2))
    second = StepPlan(2, (Row(1, 6, 4, 1),), grown(2, 3))
    batch = batch_of(first, second)
    assert batch.tables.dtype == np.int32
    assert batch.tables.flags.c_contiguous
    assert batch.tables.tolist() == [[list(table[:3])] for table in TABLES]


@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_the_fake_answers_alike_however_a_prompt_is_chunked(chunk: int) -> None:
    assert answer(chunk) == continuation(PROMPT, 1, LIMITS.vocab, windows=WINDOWS)


@pytest.mark.parametrize("group", range(3))
def test_the_fake_notices_a_block_that_was_lost_while_it_was_seen(group: int) -> None:
    assert answer(5, lost=group) != continuation(PROMPT, 1, LIMITS.vocab, windows=WINDOWS)


def answer(chunk: int, lost: int = -1) -> list[int]:
    """Returns the token after the prompt; before its last chunk, group `lost` finds another's block in its table."""
    backend = FakeBackend(LIMITS.vocab, windows=WINDOWS)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        last = start + count == len(PROMPT)
        batch = batch_of(StepPlan(start, (Row(1, start, count, int(last)),), grown(0, 3)))
        if last and lost >= 0:
            tables = batch.tables.copy()
            tables[lost, 0, (start - 1) // LIMITS.block_size] = 20
            batch = replace(batch, tables=tables)
        result = backend.wait(backend.launch(batch))
    return list(result.rows[0].tokens)

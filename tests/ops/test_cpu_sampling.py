"""Native sampling chooses the very tokens that the reference chooses, and refuses what is malformed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.backend.base import NO_EDITS, Batch, Bitmasks, ChainRow, Floats, LogitEdit, LogitEdits, SampleRows
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu._native import isas
from penstock.backend.sample import sample
from penstock.model.tensor import FORMATS, Tensor
from penstock.types import SamplerChain, StepResult


class Table:
    """A model whose logits are the rows of a table: token i answers with row i."""

    def __init__(self, backend: CpuBackend, logits: Floats) -> None:
        data = np.ascontiguousarray(logits).view(np.uint8).reshape(-1)
        self._table = backend.pack_matrix([Tensor("table", FORMATS["F32"], logits.shape, data)], [None])

    def forward(self, ops: Any) -> Any:
        return ops.take_sampled(ops.embed(self._table))


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def batch_of(rows: SampleRows) -> Batch:
    count = len(rows.target)
    chunks = [Chunk([s], 0, [0], slot=s, sample=1) for s in range(count)]
    return replace(greedy_batch(chunks), sample=rows)


def natively(
    logits: Floats, batch: Batch, masks: Bitmasks | None = None, threads: int = 2, isa: str = "auto"
) -> StepResult:
    backend = CpuBackend(threads, isa=isa)
    backend.load(Table(backend, logits))
    ticket = backend.launch(batch if masks is None else replace(batch, constrained=masks.rows))
    if masks is not None:
        backend.constrain(ticket, masks.words)
    return backend.wait(ticket)


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> Floats:
    """Rows of every temper: peaked, flat, full of ties, partly impossible."""
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * rng.choice([0.01, 1, 3, 10], (rows, 1))
    logits = np.where(rng.random((rows, 1)) < 0.3, np.round(logits), logits)
    logits[rng.random((rows, vocab)) < rng.choice([0, 0, 0.5], (rows, 1))] = -np.inf
    logits[:, rng.integers(vocab)] = 0
    return logits.astype(np.float32)


def random_edit(rng: np.random.Generator, vocab: int) -> LogitEdit | None:
    if rng.random() < 0.6:
        return None
    ids = rng.permutation(vocab).astype(np.int32)
    few = max(vocab // 4, 1)
    return LogitEdit(
        seen=ids[:few].copy(),
        repetition=float(rng.choice([1.0, 1.1, 0.7])),
        add_ids=ids[few // 2 : few].copy(),
        add_values=rng.normal(size=few - few // 2).astype(np.float32),
        ban=ids[: few // 3].copy(),
    )


def random_edits(rng: np.random.Generator, rows: int, vocab: int) -> LogitEdits:
    found = [(row, random_edit(rng, vocab)) for row in range(rows)]
    return LogitEdits.of([(row, edit) for row, edit in found if edit is not None])


def random_masks(rng: np.random.Generator, rows: int, vocab: int) -> Bitmasks:
    """Masks the first row and a third of the others: few tokens, half or most, and whole words of either."""
    constrained = np.flatnonzero((rng.random(rows) < 0.33) | (np.arange(rows) == 0)).astype(np.int32)
    count = len(constrained)
    allowed = rng.random((count, -(-vocab // 32) * 32)) < rng.choice([0.01, 0.5, 0.99], (count, 1))
    for mask in allowed:
        mask.reshape(-1, 32)[:: rng.integers(2, 5)] = rng.random() < 0.5
    return Bitmasks(constrained, np.packbits(allowed, axis=1, bitorder="little").view(np.int32))


def random_rows(rng: np.random.Generator, rows: int, vocab: int) -> SampleRows:
    return SampleRows(
        target=np.where(rng.random(rows) < 0.1, rng.integers(vocab, size=rows), -1).astype(np.int32),
        temperature=rng.choice([0, 0.3, 0.8, 1, 1.7, 100], rows).astype(np.float32),
        top_p=rng.choice([1, 1, 0.95, 0.5, 0.999, 0], rows).astype(np.float32),
        top_k=rng.choice([0, 0, 1, 2, 40, 900, vocab, 2**31 - 1], rows).astype(np.int32),
        min_p=rng.choice([0, 0, 0.05, 0.5, 1], rows).astype(np.float32),
        seed=rng.integers(2**64, size=rows, dtype=np.uint64),
        logprobs=rng.choice([-1, 0, 5, 20], rows).astype(np.int32),
        edits=random_edits(rng, rows, vocab),
    )


def check_same(got: StepResult, wanted: StepResult) -> None:
    for mine, theirs in zip(got.rows, wanted.rows, strict=True):
        assert mine.tokens == theirs.tokens
        for kind in ("logprobs", "scores"):
            for one, other in zip(getattr(mine, kind), getattr(theirs, kind), strict=True):
                assert one.token == other.token
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
                assert [value for _, value in one.top] == pytest.approx([v for _, v in other.top], abs=1e-5)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("vocab", [1, 2, 21, 83, 1000, 8192, 20011])
def test_the_reference_is_followed_to_the_token(vocab: int, isa: str):
    rows = 60 if vocab > 1000 else 300
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, rows, vocab)
    batch, masks = batch_of(random_rows(rng, rows, vocab)), random_masks(rng, rows, vocab)
    check_same(natively(logits, batch, masks, threads=3, isa=isa), sample(logits, batch, masks))
    check_same(natively(logits, batch, threads=3, isa=isa), sample(logits, batch))


def test_a_large_vocabulary():
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 6, 250_000)
    batch, masks = batch_of(random_rows(rng, 6, 250_000)), random_masks(rng, 6, 250_000)
    check_same(natively(logits, batch, masks), sample(logits, batch, masks))


def test_the_first_of_equal_logits_is_the_most_likely():
    logits = np.full((1, 30_000), 2.5, np.float32)
    assert natively(logits, batch_of(greedy())).rows[0].tokens == (0,)
    logits[0, 9_000] = logits[0, 25_000] = 3
    assert natively(logits, batch_of(greedy())).rows[0].tokens == (9_000,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_logits_that_are_no_numbers_harm_nothing(value: float, temperature: float):
    logits = np.full((1, 100), value, np.float32)
    rows = replace(greedy(), temperature=np.array([temperature], np.float32), top_p=np.array([0.5], np.float32))
    for found in (natively(logits, batch_of(rows)), sample(logits, batch_of(rows))):
        assert found.rows[0].tokens == (0,)
        assert found.not_finite == (0,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_is_impossible(temperature: float):
    logits = np.full((1, 100), -np.inf, np.float32)
    logits[0, ::2], logits[0, 51] = np.nan, 3
    rows = replace(greedy(), temperature=np.array([temperature], np.float32))
    for found in (natively(logits, batch_of(rows)), sample(logits, batch_of(rows))):
        assert found.rows[0].tokens == (51,)
        assert found.not_finite == ()


def greedy() -> SampleRows:
    return greedy_batch([Chunk([0], 0, [0])]).sample


EDIT = LogitEdits.of([(0, LogitEdit(ints(1), 1.5, ints(2), np.ones(1, np.float32), ints(3)))])
BAD: dict[str, SampleRows] = {
    "target beyond the vocabulary": replace(greedy(), target=ints(50)),
    "a number missing": replace(greedy(), top_k=ints()),
    "a number too many": replace(greedy(), logprobs=ints(-1, -1)),
    "temperatures of another type": replace(greedy(), temperature=np.zeros(1, np.float64)),
    "seeds of another type": replace(greedy(), seed=ints(1)),
    "an id beyond the vocabulary": replace(greedy(), edits=replace(EDIT, seen=ints(50))),
    "a negative id": replace(greedy(), edits=replace(EDIT, ban=ints(-1))),
    "values missing": replace(greedy(), edits=replace(EDIT, add_ids=ints(2, 4), add_start=ints(0, 2))),
    "an edit of no row": replace(greedy(), edits=replace(EDIT, rows=ints(1))),
    "a negative row": replace(greedy(), edits=replace(EDIT, rows=ints(-1))),
    "ids of another type": replace(greedy(), edits=replace(EDIT, ban=np.zeros(1, np.int64))),
    "a start missing": replace(greedy(), edits=replace(EDIT, seen_start=ints(0))),
    "starts that decrease": replace(greedy(), edits=replace(EDIT, seen_start=ints(1, 1))),
    "starts beyond the ids": replace(greedy(), edits=replace(EDIT, ban_start=ints(0, 2))),
    "a penalty missing": replace(greedy(), edits=replace(EDIT, repetition=np.zeros(0, np.float32))),
    "no starts at all": replace(greedy(), edits=replace(NO_EDITS, add_start=ints())),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_draws_are_refused_and_harm_nothing(name: str):
    logits = np.arange(50, dtype=np.float32)[None]
    backend = CpuBackend(2)
    backend.load(Table(backend, logits))
    with pytest.raises((ValueError, TypeError)):
        backend.launch(replace(batch_of(greedy()), sample=BAD[name]))
    assert backend.wait(backend.launch(batch_of(greedy()))).rows[0].tokens == (49,)


CHAIN = ChainRow(0, SamplerChain(("xtc",), xtc_probability=1.0, xtc_threshold=1e-6), 1.0, 1.0, 0, 0.0)


def test_a_chain_reads_the_logits_of_its_row() -> None:
    """Edits and masks change what it chooses from: it excludes all but the least likely that they leave."""
    logits = np.tile(np.linspace(0, 5, 50, dtype=np.float32), (3, 1))
    edits = LogitEdits.of([(2, LogitEdit(ints(), 1.0, ints(), np.zeros(0, np.float32), ints(0)))])
    rows = replace(random_rows(np.random.default_rng(0), 3, 50), target=ints(-1, -1, -1), edits=edits)
    rows = replace(rows, temperature=np.zeros(3, np.float32), logprobs=ints(-1, -1, 1))
    batch = batch_of(replace(rows, chains=(CHAIN._replace(row=1), CHAIN._replace(row=2))))
    masks = Bitmasks(ints(2), np.array([[~2, -1]], np.int32))
    plain, chained, masked = natively(logits, batch, masks).rows
    assert (plain.tokens, chained.tokens, masked.tokens) == ((49,), (0,), (2,))
    assert [entry.token for entry in masked.logprobs] == [2]


@pytest.mark.parametrize("row", [-1, 1])
def test_a_chain_of_no_row_is_refused_and_harms_nothing(row: int) -> None:
    backend = CpuBackend(2)
    backend.load(Table(backend, np.arange(50, dtype=np.float32)[None]))
    with pytest.raises(ValueError, match="the last step has no such row"):
        backend.launch(batch_of(replace(greedy(), chains=(CHAIN._replace(row=row),))))
    assert backend.wait(backend.launch(batch_of(greedy()))).rows[0].tokens == (49,)


MASK = np.full((1, 2), -1, np.int32)
BAD_MASKS = {
    "of no row": (ints(1), MASK),
    "of a negative row": (ints(-1), MASK),
    "too few": (ints(0), MASK[:0]),
    "too many": (ints(0), np.concatenate([MASK, MASK])),
    "two of one row": (ints(0, 0), np.concatenate([MASK, MASK])),
    "too short": (ints(0), MASK[:, :1].copy()),
    "of another type": (ints(0), MASK.astype(np.int64)),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_malformed_masks_are_refused_and_harm_nothing(name: str):
    backend = CpuBackend(2)
    backend.load(Table(backend, np.arange(50, dtype=np.float32)[None]))
    rows, words = BAD_MASKS[name]
    ticket = backend.launch(replace(batch_of(greedy()), constrained=rows))
    with pytest.raises((ValueError, TypeError)):
        backend.constrain(ticket, words)
    with pytest.raises(ValueError, match="waits for no bitmasks"):
        backend.constrain(ticket, MASK)
    assert backend.wait(backend.launch(batch_of(greedy()))).rows[0].tokens == (49,)

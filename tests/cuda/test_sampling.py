"""Tokens chosen on the device are those that backend/sample.py chooses, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.backend import sample
from penstock.backend.base import Bitmasks, LogitEdit, LogitEdits, SampleRows
from penstock.backend.batches import Chunk, greedy_batch, greedy_rows
from penstock.backend.cuda.kernels import sample_tokens, sampling_threshold
from penstock.backend.cuda.sampler import DeviceSampler
from tests.cuda.device import DEVICE, ints


def chosen(logits: np.ndarray, rows: SampleRows, masks: Bitmasks | None = None) -> tuple[list[int], Any]:
    count, vocab = logits.shape
    sampler = DeviceSampler(torch.device(DEVICE), count)
    sampler.reserve(vocab)
    on_device = SimpleNamespace(
        temperature=torch.from_numpy(rows.temperature).to(DEVICE),
        top_p=torch.from_numpy(rows.top_p).to(DEVICE),
        top_k=ints(rows.top_k),
        min_p=torch.from_numpy(rows.min_p).to(DEVICE),
        seeds=ints(rows.seed.view(np.int32).reshape(-1, 2)),
        target=ints(rows.target),
        sample_slots=ints(range(count)),
    )
    last, out = ints([-7] * count), ints([-7] * count)
    asked = sampler.sample(torch.from_numpy(logits.copy()).to(DEVICE), on_device, rows, last, out, masks)
    assert torch.equal(last, out)
    return out.tolist(), asked and asked.read()


def rows_of(count: int, seed: int, **settings: Any) -> SampleRows:
    seeds = np.random.default_rng(seed).integers(2**64, size=count, dtype=np.uint64)
    arrays = {
        name: np.full(count, value, np.int32 if name in ("top_k", "logprobs", "target") else np.float32)
        for name, value in settings.items()
    }
    return replace(greedy_rows(count), seed=seeds, **arrays)


def random_logits(count: int, vocab: int, seed: int = 0, spread: float = 4.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (count, vocab)).astype(np.float32)


@pytest.mark.parametrize("vocab", [5, 4096, 9001])
def test_greedy_takes_the_first_of_the_highest(vocab: int) -> None:
    logits = random_logits(4, vocab)
    logits[1, [1, vocab - 1]] = 50
    logits[2, 3:] = logits[2, 3]
    assert chosen(logits, greedy_rows(4))[0] == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 30.0])
@pytest.mark.parametrize("vocab", [7, 9001])
def test_temperature_alone(vocab: int, temperature: float) -> None:
    logits = random_logits(12, vocab)
    rows = rows_of(12, 3, temperature=temperature)
    assert chosen(logits, rows)[0] == sample.choose(logits, rows).tolist()


@settings(max_examples=40, phases=[Phase.generate])
@given(
    st.integers(0, 1000),
    st.sampled_from([3, 5000]),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 5, 40, 10_000]),
    st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.booleans(),
    st.sampled_from([16, sampling_threshold.CANDIDATES]),
)
def test_every_cut(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: bool, few: int
) -> None:
    logits = random_logits(3, vocab, seed)
    if ties:
        logits = np.round(logits)
    rows = rows_of(3, seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_threshold, "CANDIDATES", few)
        assert chosen(logits, rows)[0] == sample.choose(logits, rows).tolist()


def test_rows_do_not_touch_each_other() -> None:
    logits = random_logits(6, 600)
    rows = rows_of(6, 1)
    rows = replace(
        rows,
        temperature=np.array([0, 1, 1, 0.5, 0, 2], np.float32),
        top_k=np.array([3, 0, 3, 0, 0, 7], np.int32),
        top_p=np.array([1, 1, 0.5, 0.2, 1, 1], np.float32),
        target=np.array([-1, -1, -1, -1, 17, -1], np.int32),
    )
    assert chosen(logits, rows)[0] == sample.choose(logits, rows).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [33, 4096, 9001])
def test_what_a_grammar_forbids_is_never_chosen(vocab: int, temperature: float) -> None:
    rng = np.random.default_rng(vocab)
    logits = random_logits(6, vocab)
    allowed = rng.random((6, -(-vocab // 32) * 32)) < [[0.0], [0.02], [0.5], [0.5], [0.99], [1.0]]
    allowed[0, 17] = allowed[1, 18] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    constrained = np.array([0, 1, 2, 4, 5], np.int32)
    rows, masks = rows_of(6, 5, temperature=temperature), Bitmasks(constrained, bits[constrained])
    tokens = chosen(logits, rows, masks)[0]
    assert tokens == sample.choose(logits, rows, masks).tolist()
    assert all(allowed[s, token] for s, token in enumerate(tokens) if s != 3)


@pytest.mark.parametrize("vocab", [40, 9001])
def test_logprobs_of_the_tokens_alone(vocab: int) -> None:
    logits = random_logits(4, vocab)
    logits[2, ::2] = -np.inf
    rows = replace(rows_of(4, 5, temperature=1.0), logprobs=np.array([0, -1, 0, 0], np.int32))
    batch = replace(greedy_batch([Chunk([0], 0, [0], slot) for slot in range(4)]), sample=rows)
    wanted = [entry for row in sample.sample(logits, batch).rows for entry in row.logprobs]
    tokens, found = chosen(logits, rows)
    assert [entry.token for entry in found] == [entry.token for entry in wanted] == [*tokens[:1], *tokens[2:]]
    assert np.allclose([entry.logprob for entry in found], [entry.logprob for entry in wanted], atol=1e-5)
    assert all(entry.top == () for entry in found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edits_and_logprobs(temperature: float) -> None:
    logits = random_logits(3, 300)
    floats = lambda *values: np.array(values, np.float32)  # noqa: E731
    whole = lambda *values: np.array(values, np.int32)  # noqa: E731
    best = logits.argmax(1)
    first = LogitEdit(whole(1, int(best[0])), 1.7, whole(5, 6), floats(9.5, -3), whole(4))
    third = LogitEdit(whole(), 1.0, whole(), floats(), whole(int(best[2])))
    edits = LogitEdits.of([(0, first), (2, third)])
    rows = replace(rows_of(3, 5, temperature=temperature), edits=edits, logprobs=whole(2, -1, 0))
    batch = replace(greedy_batch([Chunk([0], 0, [0], slot) for slot in range(3)]), sample=rows)
    wanted = sample.sample(logits, batch).rows
    tokens, logprobs = chosen(logits, rows)
    assert tokens == [row.tokens[0] for row in wanted]
    for got, row in zip(logprobs, [wanted[0], wanted[2]], strict=True):
        entry = row.logprobs[0]
        assert (got.token, [t for t, _ in got.top]) == (entry.token, [t for t, _ in entry.top])
        assert np.allclose(
            [got.logprob, *[v for _, v in got.top]], [entry.logprob, *[v for _, v in entry.top]], atol=1e-4
        )


def test_a_row_of_minus_infinities_and_one_peak() -> None:
    logits = np.full((2, 50), -np.inf, np.float32)
    logits[0, 9] = 3
    logits[1, [4, 8]] = 3
    rows = rows_of(2, 1, temperature=1.0, top_p=0.9)
    assert chosen(logits, rows)[0] == sample.choose(logits, rows).tolist()


def test_weights_are_those_of_the_definition() -> None:
    """Over several chunks, masses add up to the same integers."""
    logits = random_logits(1, 3 * sample_tokens.CHUNK + 5)
    for seed in range(20):
        rows = rows_of(1, seed, temperature=0.9)
        assert chosen(logits, rows)[0] == sample.choose(logits, rows).tolist()

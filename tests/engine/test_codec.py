"""A batch is data: sent through bytes it computes the same on every backend, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.backend.base import Batch, ChainRow, Ints, LogitEdit, LogitEdits, Pool, StateMove
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.codec import decode_batch, encode_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.fake import FakeBackend
from penstock.backend.ref import RefBackend
from penstock.model.load import load_model, open_checkpoint
from penstock.types import SamplerChain

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
HYBRID = open_checkpoint(GOLDENS / "qwen3next")  # has KV and recurrent states
VOCAB = HYBRID.spec.vocab


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def steps() -> Iterator[Batch]:
    """Yields two prompts, then an answer to each, with edits, logprobs, scores, masks, states and an embedding."""
    prompts = greedy_batch([Chunk([5, 9, 3, 7, 1], 0, [2, 0], 0, 2), Chunk([4, 4, 8], 0, [1], 1, 1)], 0)
    edits = LogitEdits.of(
        [
            (1, LogitEdit(ints(5, 9), 1.3, ints(7, 8), np.array([0.5, -2], np.float32), ints())),
            (2, LogitEdit(ints(), 1.0, ints(), np.zeros(0, np.float32), ints(*range(30)))),
        ]
    )
    rows = replace(
        prompts.sample,
        target=ints(1, -1, -1),
        temperature=np.array([0, 0.8, 1.2], np.float32),
        top_p=np.array([1, 0.9, 1], np.float32),
        seed=np.array([1, 2**63 + 5, 9], np.uint64),
        logprobs=ints(2, 1, -1),
        edits=edits,
    )
    yield replace(prompts, sample=rows, constrained=ints(2), pools=(Pool(1, 5, 8, True, 3),))
    answers = greedy_batch([Chunk([-1], 5, [2, 0], 0, 1), Chunk([-1], 3, [1], 1, 1)], 1)
    chain = ChainRow(1, SamplerChain(("typical_p", "top_k"), typical_p=0.9), 0.7, 0.9, 5, 0.1, 2.5)
    rows = replace(answers.sample, chains=(chain,))
    yield replace(answers, sample=rows, constrained=ints(0, 1), moves=(StateMove(0, -1, 2, 1),), adapters=ints(-1, -1))


def masks_of(batch: Batch) -> Ints:
    rng = np.random.default_rng(batch.step)
    return rng.integers(-(2**31), 2**31, (len(batch.constrained), -(-VOCAB // 32)), np.int32)


def loaded(backend: Any) -> Any:
    backend.load(load_model(HYBRID, backend))
    return backend


BACKENDS: dict[str, Callable[[], Any]] = {
    "fake": lambda: FakeBackend(VOCAB),
    "ref": lambda: loaded(RefBackend()),
    "cpu": lambda: loaded(CpuBackend(2)),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_decoded_batch_computes_the_same_to_the_bit(name: str) -> None:
    answers = []
    for send in (lambda batch: batch, lambda batch: decode_batch(encode_batch(batch))):
        backend = BACKENDS[name]()
        backend.reserve_kv(4, 4, 3)
        found = []
        for batch in map(send, steps()):
            ticket = backend.launch(batch)
            backend.constrain(ticket, masks_of(batch))
            found.append(backend.wait(ticket))
        answers.append(found)
    assert answers[0] == answers[1]
    tokens = [row.tokens for result in answers[0] for row in result.rows]
    assert all(tokens)
    assert answers[0][0].rows[0].scores
    assert answers[0][0].rows[1].pooled


def test_every_field_survives() -> None:
    for batch in steps():
        assert_same(decode_batch(encode_batch(replace(batch, program=3))), replace(batch, program=3))


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if is_dataclass(wanted):
        for field in fields(wanted):
            assert_same(getattr(got, field.name), getattr(wanted, field.name))
    elif isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype
        assert np.array_equal(got, wanted)
    else:
        assert got == wanted


def test_an_object_in_a_batch_is_refused() -> None:
    batch = next(steps())
    with pytest.raises(TypeError, match="arrays and plain data only; got StateMoves"):
        encode_batch(replace(batch, moves=StateMoves()))  # type: ignore[arg-type]


class StateMoves:
    """Is no data."""


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xc1", encode_batch(next(steps()))[:-3]])
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_batch(data)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_waits_for_its_masks_and_obeys_them(name: str) -> None:
    backend = BACKENDS[name]()
    backend.reserve_kv(4, 4, 3)
    batch = replace(greedy_batch([Chunk([5, 9, 3], 0, [2], 0, 1), Chunk([4], 0, [1], 1, 1)]), constrained=ints(1))
    for token in (0, 31, 32, VOCAB - 1):
        words = np.zeros((1, 2), np.int32)
        words[0, token // 32] = np.uint32(1 << token % 32).view(np.int32)
        ticket = backend.launch(batch)
        with pytest.raises(KeyError):
            backend.wait(ticket)
        backend.constrain(ticket, words)
        first, second = backend.wait(ticket).rows
        assert second.tokens == (token,)
        assert first == backend.wait(backend.launch(replace(batch, constrained=ints()))).rows[0]


@pytest.mark.parametrize("name", BACKENDS)
def test_masks_that_nobody_waits_for_are_refused(name: str) -> None:
    backend = BACKENDS[name]()
    backend.reserve_kv(4, 4, 3)
    batch = replace(greedy_batch([Chunk([5], 0, [2], 0, 1)]), constrained=ints(0))
    ticket = backend.launch(batch)
    with pytest.raises(ValueError, match=f"step {ticket + 1} waits for no bitmasks"):
        backend.constrain(ticket + 1, np.full((1, 2), -1, np.int32))

"""Batches as data on the GPU: through bytes, with bitmasks after the launch; and KV blocks that leave and return."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.base import Batch, Bitmasks, ChainRow, Ints, LogitEdit, LogitEdits
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.codec import decode_batch, encode_batch
from penstock.backend.cuda import CudaBackend, devices
from penstock.backend.sample import sample
from penstock.backend.sampler_chain import with_chains
from penstock.errors import ConfigError
from penstock.model.load import load_model, open_checkpoint
from penstock.types import SamplerChain, StepResult
from tests.cuda.device import DEVICE

CHECKPOINT = open_checkpoint(Path(__file__).parents[1] / "models" / "goldens" / "llama3")
VOCAB = CHECKPOINT.spec.vocab
WORDS = -(-VOCAB // 32)


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def loaded(max_rows: int = 8) -> CudaBackend:
    backend = CudaBackend(64, max_rows, device=DEVICE, dtype=torch.float32)
    backend.load(load_model(CHECKPOINT, backend))
    backend.reserve_kv(8, 4)
    return backend


def one_step() -> Batch:
    batch = greedy_batch([Chunk([5, 9, 3, 7, 1], 0, [2, 0], 0, 2), Chunk([4, 4, 8], 0, [1], 1, 1)])
    edit = LogitEdit(ints(5, 9), 1.3, ints(7, 8), np.array([0.5, -2], np.float32), ints(*range(10)))
    rows = replace(
        batch.sample,
        target=ints(1, -1, -1),
        temperature=np.array([0, 0.8, 1.2], np.float32),
        seed=np.array([1, 2**63 + 5, 9], np.uint64),
        logprobs=ints(2, 1, -1),
        edits=LogitEdits.of([(1, edit)]),
    )
    return replace(batch, sample=rows, constrained=ints(1, 2))


def answer(backend: CudaBackend, batch: Batch, words: Any) -> StepResult:
    ticket = backend.launch(batch)
    backend.constrain(ticket, words)
    return backend.wait(ticket)


def random_words(count: int) -> Ints:
    return np.random.default_rng(0).integers(-(2**31), 2**31, (count, WORDS), np.int32)


def test_a_decoded_batch_computes_the_same_to_the_bit() -> None:
    batch = one_step()
    wanted = answer(loaded(), batch, random_words(2))
    assert answer(loaded(), decode_batch(encode_batch(batch)), random_words(2)) == wanted


def test_tokens_are_those_of_the_definition_under_edits_and_masks() -> None:
    backend, batch, words = loaded(), one_step(), random_words(2)
    wanted = sample(backend.logits(batch), batch, Bitmasks(batch.constrained, words))
    assert [row.tokens for row in answer(backend, batch, words).rows] == [row.tokens for row in wanted.rows]


def test_chains_are_those_of_the_definition_under_edits_and_masks() -> None:
    backend, batch, words = loaded(), one_step(), random_words(2)
    chains = tuple(ChainRow(s, SamplerChain(typical_p=0.9, mirostat=s - 1), 1.0, 0.9, 0, 0.0, 5.0) for s in (1, 2))
    batch = replace(batch, sample=replace(batch.sample, chains=chains, temperature=np.zeros(3, np.float32)))
    logits, masks = backend.logits(batch), Bitmasks(batch.constrained, words)
    wanted = with_chains(sample(logits, batch, masks), batch, logits[1:], masks)
    got = answer(backend, batch, words)
    assert [(row.tokens, row.surprise) for row in got.rows] == [(row.tokens, row.surprise) for row in wanted.rows]
    assert got.rows[0].logprobs == wanted.rows[0].logprobs
    assert got.rows[1].surprise is not None


def test_chains_find_their_rows_where_positions_are_sampled_some_at_a_time() -> None:
    backend = loaded(max_rows=8)
    chunks = [Chunk(range(1, 20), 0, range(5), 0), Chunk([3], 0, [5], 1)]
    batch = greedy_batch(chunks)
    excluding = SamplerChain(("xtc",), xtc_probability=1.0, xtc_threshold=1e-6)
    chains = tuple(ChainRow(s, excluding, 1.0, 1.0, 0, 0.0) for s in (18, 19))
    batch = replace(batch, sample=replace(batch.sample, chains=chains, seed=np.arange(20, dtype=np.uint64) << 59))
    logits = backend.logits(batch)
    wanted = with_chains(sample(logits, batch), batch, logits[18:], None)
    assert [row.tokens for row in backend.wait(backend.launch(batch)).rows] == [row.tokens for row in wanted.rows]
    assert wanted.rows[1].tokens != (int(logits[19].argmax()),)


def test_masks_find_their_rows_where_positions_are_sampled_some_at_a_time() -> None:
    backend = loaded(max_rows=8)
    batch = greedy_batch([Chunk(range(1, 21), 0, range(5), 0)])
    constrained = ints(0, 3, 9, 17, 19)
    allowed = ints(2, 7, 11, 20, 5)
    words = np.zeros((5, WORDS), np.int32)
    words[np.arange(5), allowed // 32] = 1 << allowed % 32
    bias = LogitEdit(ints(), 1.0, ints(30), np.full(1, 1e4, np.float32), ints())
    edits = LogitEdits.of([(s, bias) for s in (2, 10, 18)])
    batch = replace(batch, sample=replace(batch.sample, edits=edits), constrained=constrained)
    (row,) = answer(backend, batch, words).rows
    assert [row.tokens[s] for s in constrained] == allowed.tolist()
    assert [s for s, token in enumerate(row.tokens) if token == 30 and s not in constrained] == [2, 10, 18]


def test_masks_that_nobody_waits_for_are_refused() -> None:
    backend = loaded()
    ticket = backend.launch(replace(one_step(), constrained=ints()))
    with pytest.raises(ValueError, match="waits for no bitmasks"):
        backend.constrain(ticket, random_words(2))
    assert backend.wait(ticket)


def test_a_program_that_is_not_loaded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"program 1 is not loaded: a batch runs one of those that are \(0\)"):
        loaded().launch(replace(one_step(), program=1))


def test_exported_blocks_are_as_good_as_computed_ones() -> None:
    first, second = loaded(), loaded()
    assert first.kv.fingerprint() == second.kv.fingerprint()
    first.logits(greedy_batch([Chunk([5, 9, 3, 7, 1], 0, [2, 0], 0, 0)]))
    wanted = first.logits(greedy_batch([Chunk([6], 5, [2, 0], 0, 1)]))
    data = first.kv.export_blocks([2, 0])
    second.kv.import_blocks([4, 1], data)
    second.kv.copy_blocks([(4, 7)])
    assert np.array_equal(second.logits(greedy_batch([Chunk([6], 5, [7, 1], 0, 1)])), wanted)
    with pytest.raises(ValueError, match=f"2 KV blocks take {len(data)} bytes; got 1"):
        second.kv.import_blocks([4, 1], b"x")
    second.reserve_kv(8, 8)
    assert first.kv.fingerprint() != second.kv.fingerprint()


@pytest.mark.parametrize(("count", "told"), [(0, "finds no CUDA device"), (1, "only cuda:0"), (3, "cuda:0 to cuda:2")])
def test_a_gpu_that_is_not_there_is_an_error(count: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: count)
    with pytest.raises(ConfigError, match=told):
        CudaBackend(device="cuda:7")


def test_a_gpu_has_its_index() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "gpu_count", lambda: 2)
        assert devices.checked_device("cuda:1") == torch.device("cuda", 1)
        assert devices.checked_device("cuda") == torch.device("cuda", 0)

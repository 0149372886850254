"""Several programs run over one memory: the same block ids and slots, and each answers as it does alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from penstock.backend.base import LAST_SAMPLED, Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.fake import FakeBackend, continuation
from penstock.backend.ref import RefBackend
from penstock.model.load import load_model, open_checkpoint
from penstock.types import RowResult
from tests.models import test_eagle as eagle

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
MODELS = {0: "llama3", 1: "qwen3next"}  # a target, and a draft with recurrent states
PROMPTS = ([5, 9, 3, 7, 1, 20], [4, 4, 8])
TABLES = ([2, 0, 4], [1, 5, 3])
BACKENDS: dict[str, Callable[[], Any]] = {"fake": FakeBackend, "ref": RefBackend, "cpu": lambda: CpuBackend(2)}


def loaded(name: str, programs: Sequence[int]) -> Any:
    backend = BACKENDS[name]()
    for program in programs:
        model = None if name == "fake" else load_model(open_checkpoint(GOLDENS / MODELS[program]), backend)
        backend.load(model, program)
    backend.reserve_kv(6, 4, 2)
    return backend


def steps(program: int) -> Iterator[Batch]:
    """Yields both prompts and five more tokens for each; the device knows what it sampled last."""
    numbers = iter(range(program, 100, 2))
    chunks = zip(PROMPTS, TABLES, strict=True)
    yield greedy_batch([Chunk(prompt, 0, table, slot, 1) for slot, (prompt, table) in enumerate(chunks)], next(numbers))
    for more in range(5):
        rows = [
            Chunk([LAST_SAMPLED], len(prompt) + more, table, slot, 1)
            for slot, (prompt, table) in enumerate(zip(PROMPTS, TABLES, strict=True))
        ]
        yield greedy_batch(rows, next(numbers))


def answer(backend: Any, programs: Sequence[int]) -> dict[int, list[tuple[int, ...]]]:
    """Returns the tokens that each program answers, step by step, when they step alternately."""
    found: dict[int, list[tuple[int, ...]]] = {program: [] for program in programs}
    for together in zip(*map(steps, programs), strict=True):
        for program, batch in zip(programs, together, strict=True):
            result = backend.wait(backend.launch(replace(batch, program=program)))
            found[program].append(tuple(row.tokens[0] for row in result.rows))
    return found


@pytest.mark.parametrize("name", BACKENDS)
def test_target_and_draft_answer_as_each_does_alone(name: str) -> None:
    together = answer(loaded(name, [0, 1]), [0, 1])
    assert together == {program: answer(loaded(name, [program]), [program])[program] for program in MODELS}
    assert together[0] != together[1]


def test_the_fake_answers_for_program_zero_what_it_must() -> None:
    found = answer(loaded("fake", [0, 1]), [0, 1])[0]
    for slot, prompt in enumerate(PROMPTS):
        assert [tokens[slot] for tokens in found] == continuation(prompt, 6, 1000, stateful=True)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_program_that_is_not_loaded_is_refused(name: str) -> None:
    batch = next(steps(0))
    with pytest.raises(ValueError, match=r"program 1 is not loaded: a batch runs one of those that are \(0\)"):
        loaded(name, [0]).launch(replace(batch, program=1))


@pytest.mark.parametrize("name", ["ref", "cpu"])
def test_all_programs_are_counted(name: str) -> None:
    alone = [loaded(name, [program]).memory_needs() for program in MODELS]
    both = loaded(name, [0, 1]).memory_needs()
    assert both.kv_bytes_per_token == sum(needs.kv_bytes_per_token for needs in alone) > 0
    assert both.state_bytes == sum(needs.state_bytes for needs in alone) > 0


def test_programs_on_a_cpu_share_its_threads() -> None:
    backend = CpuBackend(3)
    for program, name in MODELS.items():
        backend.load(load_model(open_checkpoint(GOLDENS / name), backend), program)
    assert [each.native.threads for each in backend._programs.values()] == [3, 3]


@pytest.mark.parametrize("name", ["ref", "cpu"])
def test_a_token_of_its_own_vocabulary_is_read_as_what_it_stands_for(name: str) -> None:
    """A head that chooses among fewer tokens than it reads drafts the same, whether or not the host knows its last."""
    backend, head = eagle.loaded("sglang", BACKENDS[name])
    text, drafts = PROMPTS[0], []
    for knows in (True, False):
        eagle.run(backend, 0, text[:-1], 0)
        rows, drafted = [Chunk(text[1:], 0, eagle.TABLE, 0, 1)], list[RowResult]()
        for depth in range(4):
            batch = replace(greedy_batch(rows, depth), program=1)
            batch = replace(batch, sample=replace(batch.sample, logprobs=np.full(1, 3, np.int32)))
            [row] = backend.wait(backend.launch(batch)).rows
            drafted.append(row)
            last = head.token_ids[row.tokens[0]] if knows else LAST_SAMPLED
            rows = [Chunk([last], len(text) - 1 + depth, eagle.TABLE, 0, 1)]
        drafts.append(drafted)
    assert drafts[0] == drafts[1]
    assert any(head.token_ids[row.tokens[0]] != row.tokens[0] for row in drafts[0])


# -- blocks ------------------------------------------------------------------------------------------------------


def last_tokens(backend: Any, tables: Sequence[Sequence[int]]) -> list[Any]:
    """Returns what each program answers to the last token of the first prompt, whose KV before it is in `tables`."""
    prompt = PROMPTS[0]
    batch = greedy_batch([Chunk(prompt[-1:], len(prompt) - 1, tables[0], 0, 1)], 50)
    batch = replace(batch, sample=replace(batch.sample, logprobs=np.full(1, 3, np.int32)))
    return [backend.wait(backend.launch(replace(batch, program=program))).rows for program in (0, 1)]


def prompted(name: str) -> Any:
    """Returns a backend that has computed the first prompt, without its last token, for two programs without states."""
    backend = BACKENDS[name]()
    for program, model in enumerate(("llama3", "qwen2")):
        backend.load(None if name == "fake" else load_model(open_checkpoint(GOLDENS / model), backend), program)
    backend.reserve_kv(6, 4)
    for program in (0, 1):
        batch = greedy_batch([Chunk(PROMPTS[0][:-1], 0, TABLES[0], 0, 0)], program)
        backend.wait(backend.launch(replace(batch, program=program)))
    return backend


@pytest.mark.parametrize("name", BACKENDS)
def test_copied_blocks_are_as_good_as_computed_ones_for_every_program(name: str) -> None:
    backend = prompted(name)
    wanted = last_tokens(backend, TABLES)
    backend.kv.copy_blocks([(2, 5), (0, 3)])
    backend.kv.copy_blocks([(1, 2), (1, 0)])  # what was there is lost
    assert last_tokens(backend, [[5, 3]]) == wanted


@pytest.mark.parametrize("name", BACKENDS)
def test_blocks_are_copied_to_rows_and_back_with_their_crcs(name: str) -> None:
    first, second = prompted(name), prompted(name)
    wanted = last_tokens(first, TABLES)
    kept = prompted(name).kv
    size = len(kept.export_blocks([0]))
    rows = np.zeros((5, size), np.uint8)
    assert kept.copy_out([2, 0], rows, [4, 1], [7, 9]) == [crc32(rows[4], 7), crc32(rows[1], 9)]
    assert rows[[4, 1]].tobytes() == kept.export_blocks([2, 0])
    second.kv.import_blocks([2, 0], bytes(2 * size))
    assert second.kv.copy_in([4, 1], rows, [4, 1], [7, 9]) == [crc32(rows[4], 7), crc32(rows[1], 9)]
    assert last_tokens(second, [[4, 1]]) == wanted
    assert kept.copy_out([2], rows, [0]) == []
    assert rows[0].tobytes() == kept.export_blocks([2])
    for blocks, place in (([2], 5), ([1000], 0)):
        with pytest.raises((IndexError, ValueError)):
            kept.copy_out(blocks, rows, [place], [0])


@pytest.mark.parametrize("name", BACKENDS)
def test_exported_blocks_are_as_good_as_computed_ones_for_every_program(name: str) -> None:
    first, second = prompted(name), prompted(name)
    wanted = last_tokens(first, TABLES)
    assert first.kv.fingerprint() == second.kv.fingerprint()
    second.kv.import_blocks([2, 0], bytes(len(second.kv.export_blocks([2, 0]))))
    data = prompted(name).kv.export_blocks([2, 0])
    assert data == prompted(name).kv.export_blocks([2]) + prompted(name).kv.export_blocks([0])
    second.kv.import_blocks([4, 1], data)
    assert last_tokens(second, [[4, 1]]) == wanted
    for wrong in (data[:-1], data + b"x", b""):
        with pytest.raises(ValueError, match=rf"2 KV blocks take {len(data)} bytes; got {len(wrong)}"):
            second.kv.import_blocks([4, 1], wrong)


@pytest.mark.parametrize("name", BACKENDS)
def test_layouts_that_differ_have_other_fingerprints(name: str) -> None:
    backend = prompted(name)
    found = {backend.kv.fingerprint()}
    backend.reserve_kv(6, 8)
    found.add(backend.kv.fingerprint())
    found.add(loaded(name, [0]).kv.fingerprint())
    assert len(found) == 3
    backend.reserve_kv(12, 4)
    assert backend.kv.fingerprint() == prompted(name).kv.fingerprint()


def test_types_of_kv_have_other_fingerprints() -> None:
    found = set()
    for kind in ("f16", "f32", "int8", "int8:f16", "f16:int8"):
        backend = CpuBackend(1, kv=kind)
        backend.load(load_model(open_checkpoint(GOLDENS / "llama3"), backend))
        backend.reserve_kv(2, 4)
        found.add(backend.kv.fingerprint())
    assert len(found) == 5

"""The backend as the engine sees it: ops, tiny models and random schedules against the reference."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend, inputs
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import CASES, Case, difference, run
from penstock.backend.ref.random_steps import blocks_for, random_steps, with_groups
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.errors import UnsupportedModel
from penstock.model.load import load_model, open_checkpoint
from penstock.model.spec import KvGroup
from penstock.types import Finished, Limits, Request, SamplingParams, Tokens
from tests.cuda.device import DEVICE, HALF
from tests.engine.guesses import RandomDrafting

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir())
PRECISIONS = {torch.float32: 1e-5, HALF: 3e-2}
BLOCK_SIZE = 4
SLOTS = 65  # states, of models that have any


def backend_of(dtype: torch.dtype = torch.float32, **sizes: int) -> CudaBackend:
    return CudaBackend(sizes.get("max_tokens", 256), sizes.get("max_rows", 64), device=DEVICE, dtype=dtype)


def loaded(name: str, backend: Any, file: str = "") -> Any:
    backend.load(load_model(open_checkpoint(GOLDENS / name / file), backend))
    return backend


def expected(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(GOLDENS / name / "expected.npz") as file:
        return file["tokens"].tolist(), file["logits"]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=["f32", "half"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}: {case.name}")
def test_op_follows_the_reference(case: Case, dtype: torch.dtype) -> None:
    wanted = run(case.make(np.random.default_rng(9)), RefBackend())
    got = run(case.make(np.random.default_rng(9)), backend_of(dtype, max_tokens=2048))
    assert max(map(difference, got, wanted)) <= PRECISIONS[dtype]


@pytest.mark.parametrize("file", ["model.gguf", ""], ids=["gguf", "folder"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_prompt(name: str, file: str) -> None:
    tokens, logits = expected(name)
    backend = loaded(name, backend_of(), file)
    size = blocks_for([tokens], BLOCK_SIZE)
    backend.reserve_kv(size, BLOCK_SIZE, SLOTS)
    assert np.abs(backend.logits(greedy_batch([Chunk(tokens, 0, range(size))])) - logits).max() < 2e-4


def test_whole_prompt_in_sixteen_bits() -> None:
    tokens, logits = expected("llama3")
    backend = loaded("llama3", backend_of(HALF))
    backend.reserve_kv(64, BLOCK_SIZE, SLOTS)
    got = backend.logits(greedy_batch([Chunk(tokens, 0, range(64))]))
    assert difference(got, logits) < 8e-2  # transformers itself is 9e-2 off when it computes it in BF16
    assert (got.argmax(1) == logits.argmax(1)).mean() > 0.8


@pytest.fixture(params=[(0, 0), (65, 0), (65, 1 << 30)], ids=["as prompts", "in runs", "token by token"])
def _treated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has rows of several tokens attend as prompts do, or as drafts that are verified."""
    most, spared = request.param
    monkeypatch.setattr(inputs, "MOST_VERIFIED", most)
    monkeypatch.setattr(inputs, "SPARED", (spared, spared))


@pytest.mark.usefixtures("_treated")
@pytest.mark.parametrize("name", ["llama3", "mistral", "bias", "phi3", "gemma2", "deepseek_v3", "qwen3next"])
def test_random_chunks_among_others(name: str) -> None:
    tokens, logits = expected(name)
    prompts = [tokens, tokens[:5], tokens[:30]]
    backend = loaded(name, backend_of())
    backend.reserve_kv(blocks_for(prompts, BLOCK_SIZE), BLOCK_SIZE, SLOTS)
    for chunks in random_steps(np.random.default_rng(0), prompts, BLOCK_SIZE):
        wanted = np.concatenate([logits[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks])
        assert np.abs(backend.logits(greedy_batch(chunks)) - wanted).max() < 2e-4


@pytest.mark.usefixtures("_treated")
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "gemma4"])
def test_layer_groups_have_blocks_of_their_own_and_use_none_behind_their_window(name: str) -> None:
    tokens, logits = expected(name)
    groups = open_checkpoint(GOLDENS / name).spec.kv_groups
    windows = [group.window for group in groups]
    assert 0 < min(window for window in windows if window) < len(tokens) // 2
    prompts = [tokens, tokens[:5], tokens[:30]]
    backend = loaded(name, backend_of())
    nowhere = len(groups) * blocks_for(prompts, BLOCK_SIZE)
    backend.reserve_kv(nowhere + 1, BLOCK_SIZE, SLOTS, groups)
    for cache in backend._programs[0].memory.kv.caches.values():
        cache.lines[nowhere] = torch.nan
    for chunks in random_steps(np.random.default_rng(0), prompts, BLOCK_SIZE):
        wanted = np.concatenate([logits[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks])
        batch = with_groups(greedy_batch(chunks), windows, BLOCK_SIZE, behind=nowhere)
        assert np.abs(backend.logits(batch) - wanted).max() < 2e-4


def test_a_step_without_tables_for_every_group_is_refused() -> None:
    backend = loaded("tied", backend_of())
    for layers in ([[0]], [[0], [0]], [[0, 1], [1]], [[0, 1, 2]]):
        with pytest.raises(ValueError, match="in one group, once"):
            backend.reserve_kv(4, BLOCK_SIZE, 0, [KvGroup(0, tuple(group)) for group in layers])
    backend.reserve_kv(4, BLOCK_SIZE, 0, [KvGroup(0, (0,)), KvGroup(0, (1,))])
    with pytest.raises(ValueError, match="2 layer groups; got block tables for 1"):
        backend.logits(greedy_batch([Chunk([1], 0, [0])]))


def test_more_positions_are_scored_than_fit_at_once() -> None:
    tokens, logits = expected("tied")
    backend = loaded("tied", backend_of(max_rows=7))
    backend.reserve_kv(64, BLOCK_SIZE, SLOTS)
    batch = greedy_batch([Chunk(tokens[:40], 0, range(64))])
    assert np.abs(backend.logits(batch) - logits[:40]).max() < 2e-4
    answer = backend.wait(backend.launch(batch))
    assert list(answer.rows[0].tokens) == logits[:40].argmax(1).tolist()


def test_two_steps_in_flight_feed_each_other() -> None:
    tokens, logits = expected("untied")
    backend = loaded("untied", backend_of())
    backend.reserve_kv(24, BLOCK_SIZE, SLOTS)
    prompts, tables = [tokens[:20], tokens[:11]], [range(0, 12), range(12, 24)]
    chunks = [Chunk(p, 0, t, slot, 1) for slot, (p, t) in enumerate(zip(prompts, tables, strict=True))]
    swapped = [Chunk([-1], len(prompts[slot]), tables[slot], slot, 1) for slot in (1, 0)]
    tickets = [backend.launch(greedy_batch(chunks, step=0)), backend.launch(greedy_batch(swapped, step=1))]
    first, second = (backend.wait(ticket) for ticket in tickets)
    assert [row.tokens for row in first.rows] == [(logits[19].argmax(),), (logits[10].argmax(),)]
    for slot, row in zip((1, 0), second.rows, strict=True):
        known = [*prompts[slot], *first.rows[slot].tokens]
        alone = backend.logits(greedy_batch([Chunk(known, 0, tables[slot], 7, 1)]))
        assert row.tokens == (alone[0].argmax(),)


def test_shapes_may_be_prepared_while_the_device_is_behind() -> None:
    """The host sends steps of other shapes long before the device comes to the first of them."""
    tokens, logits = expected("tied")
    backend = loaded("tied", backend_of(max_rows=64))
    backend.reserve_kv(64, BLOCK_SIZE, SLOTS)
    shapes = [(1, 0), (8, 0), (40, 0), (64, 0), (8, 100)] if DEVICE == "cuda" else [(2, 0), (8, 100)]
    for turn in range(3 if DEVICE == "cuda" else 1):
        if turn:
            with torch.cuda.stream(backend._gpu.stream):
                torch.cuda._sleep(200_000_000)
        for rows, prompts in shapes:
            backend.prepare(rows, prompts)
    got = backend.logits(greedy_batch([Chunk(tokens[:40], 0, range(10))]))
    assert np.abs(got - logits[:40]).max() < 2e-4


def test_steps_with_prompts_run_as_graphs_too() -> None:
    """Prompts among answers, the same shape three times: launched, captured, replayed."""
    tokens, logits = expected("llama3")
    backend = loaded("llama3", backend_of())
    backend._steps.capture = True  # pads in the interpreter too
    backend.reserve_kv(100, BLOCK_SIZE, SLOTS)
    tables = [list(range(at, at + 20)) for at in (0, 20, 40, 60)]
    backend.logits(greedy_batch([Chunk(tokens[:30], 0, tables[0])]))
    for turn in range(3 if DEVICE == "cuda" else 1):
        chunks = [
            Chunk(tokens[: 20 + turn], 0, tables[1], 1),
            Chunk([tokens[30 + turn]], 30 + turn, tables[0], 0),
            Chunk(tokens[: 9 - turn], 0, tables[2], 2, 1),
        ]
        wanted = np.concatenate([logits[: 20 + turn], logits[[30 + turn]], logits[[8 - turn]]])
        assert np.abs(backend.logits(greedy_batch(chunks)) - wanted).max() < 2e-4


def test_moved_blocks_are_read_where_they_are_now() -> None:
    tokens, logits = expected("linear")
    backend = loaded("linear", backend_of())
    backend.reserve_kv(30, BLOCK_SIZE, SLOTS)
    backend.logits(greedy_batch([Chunk(tokens[:40], 0, range(10))]))
    backend.kv.copy_blocks([(block, 29 - block) for block in range(10)])
    got = backend.logits(greedy_batch([Chunk(tokens[40:], 40, [*range(29, 19, -1), 0, 1])]))
    assert np.abs(got - logits[40:]).max() < 2e-4


def test_steps_too_large_are_refused() -> None:
    backend = loaded("tied", backend_of(max_tokens=16, max_rows=8))
    backend.reserve_kv(64, BLOCK_SIZE, SLOTS)
    with pytest.raises(ValueError, match="17 tokens"):
        backend.launch(greedy_batch([Chunk([1] * 17, 0, range(64))]))


def test_unknown_activations_are_refused() -> None:
    class Odd:
        def forward(self, ops: Any) -> Any:
            return ops.act_and_mul(ops.embed(self.table), "relu")

    backend, odd = backend_of(), Odd()
    odd.table = backend.pack_matrix([next(iter(open_checkpoint(GOLDENS / "tied").tensors.values()))], [None])
    with pytest.raises(UnsupportedModel, match="'relu'"):
        backend.load(odd)


def answers(engine: Engine, requests: list[Request], rng: np.random.Generator) -> dict[int, list[int]]:
    """Runs the requests, arriving at random, to their ends."""
    got: dict[int, list[int]] = {request.id: [] for request in requests}
    ended = 0
    waiting = list(requests)
    while ended < len(requests):
        while waiting and (engine.idle or rng.random() < 0.4):
            engine.add(waiting.pop())
        for event in engine.step():
            if isinstance(event, Tokens):
                got[event.seq] += event.tokens
            else:
                assert isinstance(event, Finished)
                ended += 1
    return got


def test_drafts_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are right, or wrong in places; rows verify unequal ones in runs."""
    tokens, _ = expected("llama3")
    vocab = open_checkpoint(GOLDENS / "llama3").spec.vocab
    limits = Limits(60, 3, 64, block_size=BLOCK_SIZE, num_blocks=48, vocab=vocab)
    count, length = (3, 24) if DEVICE == "cuda" else (2, 6)
    requests = [
        Request(id, tuple(tokens[id : 20 + 3 * id]), SamplingParams(temperature=0.7 * (id % 2), seed=id), length)
        for id in range(count)
    ]
    monkeypatch.setattr(inputs, "SPARED", (0, 0))

    def answered(drafting: RandomDrafting | None) -> tuple[dict[int, list[int]], Engine]:
        backend = loaded("llama3", backend_of(max_tokens=64, max_rows=16))
        backend.reserve_kv(limits.num_blocks, BLOCK_SIZE)
        engine = assemble(backend, limits, depth=1, drafting=drafting)
        return answers(engine, requests, np.random.default_rng(0)), engine

    plain, _ = answered(None)
    drafted, engine = answered(RandomDrafting(lambda request: plain[request.id], vocab, Random(0)))
    assert drafted == plain
    assert sum(each.accepted for each in engine.stats().drafts) > 0


@settings(max_examples=6 if DEVICE == "cuda" else 2, phases=[Phase.generate])  # to shrink one takes minutes
@given(st.integers(0, 10_000))
def test_each_request_gets_what_it_gets_alone(seed: int) -> None:
    """Random arrivals, shared prefixes, a small cache and small steps, one step in flight."""
    rng = np.random.default_rng(seed)
    tokens, _ = expected("llama3")
    requests = []
    for id in range(int(rng.integers(2, 7 if DEVICE == "cuda" else 4))):
        prompt = [*tokens[: rng.integers(0, 30)], *rng.integers(0, 60, rng.integers(1, 12)).tolist()]
        params = SamplingParams(temperature=float(rng.choice([0.0, 0.8])), seed=id, top_p=float(rng.choice([1.0, 0.9])))
        requests.append(Request(id, tuple(prompt), params, int(rng.integers(1, 6))))
    vocab = open_checkpoint(GOLDENS / "llama3").spec.vocab
    limits = Limits(60, 3, 24, block_size=BLOCK_SIZE, num_blocks=int(rng.integers(16, 40)), vocab=vocab)
    backend = loaded("llama3", backend_of(max_tokens=24, max_rows=3))
    backend.reserve_kv(limits.num_blocks, BLOCK_SIZE)
    together = answers(assemble(backend, limits, depth=1), requests, rng)
    for request in requests:
        reference = loaded("llama3", RefBackend())
        reference.reserve_kv(limits.num_blocks, BLOCK_SIZE)
        alone = answers(assemble(reference, limits), [request], rng)
        assert together[request.id] == alone[request.id]

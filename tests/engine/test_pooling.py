"""Embeddings through the engine: what transformers computes (scripts/make_pooled_goldens.py), however a prompt is cut,
whatever runs beside it, and whatever the prefix cache knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.cpu import CpuBackend
from penstock.backend.fake import FakeBackend, pooled
from penstock.backend.ref import RefBackend
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.model.load import load_model, open_checkpoint
from penstock.planning.memory_plan import all_states
from penstock.types import Event, Finished, Limits, Request, SamplingParams, Tokens

MODELS = Path(__file__).parents[1] / "models"
with np.load(MODELS / "pooled.npz") as file:
    NAMES = sorted(key.removesuffix(".mean") for key in file if key.endswith(".mean") and key != "smollm2.mean")
LIMITS = Limits(max_len=64, max_rows=8, step_tokens=64, block_size=4, num_blocks=200, vocab=64)
BACKENDS: dict[str, Callable[[], Any]] = {"ref": RefBackend, "cpu": lambda: CpuBackend(2, kv="f32")}
GREEDY = SamplingParams(temperature=0)


def golden(name: str) -> tuple[list[int], dict[str, np.ndarray]]:
    with np.load(MODELS / "goldens" / name / "expected.npz") as file:
        tokens = file["tokens"].tolist()
    with np.load(MODELS / "pooled.npz") as file:
        return tokens, {kind: file[f"{name}.{kind}"] for kind in ("mean", "last")}


def engine_of(backend: Any, name: str, depth: int = 0, **changes: int) -> Engine:
    checkpoint = open_checkpoint(MODELS / "goldens" / name)
    backend.load(load_model(checkpoint, backend))
    limits = LIMITS._replace(states=4 if checkpoint.spec.state_bytes else 0, **changes)
    backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits))
    return assemble(backend, limits, depth=depth)


def asked(id: int, prompt: Iterable[int], kind: str = "mean") -> Request:
    return Request(id, tuple(prompt), SamplingParams(), 0, pooling=kind)


def answer(id: int, prompt: Iterable[int], count: int) -> Request:
    return Request(id, tuple(prompt), GREEDY, count)


def run(engine: Engine, *requests: Request) -> dict[int, Finished]:
    for request in requests:
        engine.add(request)
    ends: dict[int, Finished] = {}
    while not engine.idle:
        for event in engine.step():
            if not isinstance(event, Tokens):
                assert isinstance(event, Finished), event
                ends[event.seq] = event
    return ends


def vector(end: Finished) -> np.ndarray:
    assert end.reason == "pooled"
    return np.frombuffer(end.pooled, "<f4")


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_transformers(name: str, device: str, kind: str) -> None:
    tokens, wanted = golden(name)
    for longest in (64, 7):  # at once, and in chunks
        engine = engine_of(BACKENDS[device](), name, step_tokens=longest, max_rows=4)
        [end] = run(engine, asked(1, tokens, kind)).values()
        assert np.abs(vector(end) - wanted[kind]).max() < 1e-4


@pytest.mark.parametrize("kv", ["f16", "int8"])
@pytest.mark.parametrize("kind", ["mean", "last"])
def test_on_a_cpu_nothing_beside_it_changes_a_bit(kind: str, kv: str) -> None:
    """Alone, in chunks of every length, and among answers and other embeddings that arrive at random."""
    tokens, _ = golden("llama3")
    alone = run(engine_of(CpuBackend(2, kv=kv), "llama3"), asked(1, tokens, kind))[1].pooled
    for longest in (4, 9, 16):
        engine = engine_of(CpuBackend(1, kv=kv), "llama3", step_tokens=longest, max_rows=4)
        assert run(engine, asked(1, tokens, kind))[1].pooled == alone
    for seed in range(3):
        rng = np.random.default_rng(seed)
        engine = engine_of(CpuBackend(2, kv=kv), "llama3", step_tokens=16, prefill_budget=9)
        others = [answer(id, rng.integers(64, size=rng.integers(1, 30)), 12) for id in range(2, 6)]
        others += [asked(id, rng.integers(64, size=rng.integers(1, 50)), "mean") for id in range(6, 9)]
        assert run(engine, *others[:3], asked(1, tokens, kind), *others[3:])[1].pooled == alone


def test_a_mean_takes_nothing_from_the_prefix_cache_and_the_last_state_does() -> None:
    tokens, wanted = golden("tied")
    engine = engine_of(CpuBackend(2, kv="f32"), "tied")
    run(engine, answer(1, tokens[:40], 8))
    ends = run(engine, asked(2, tokens, "mean"))
    assert np.abs(vector(ends[2]) - wanted["mean"]).max() < 1e-4
    assert engine.stats().cached_tokens == 0
    ends = run(engine, asked(3, tokens, "last"), asked(4, tokens, "last"))
    assert np.abs(vector(ends[3]) - wanted["last"]).max() < 1e-4
    assert ends[3].pooled == ends[4].pooled
    assert engine.stats().cached_tokens >= 40


def test_the_first_state_takes_nothing_from_the_prefix_cache() -> None:
    tokens, _ = golden("tied")
    alone = run(engine_of(CpuBackend(2, kv="f32"), "tied"), asked(1, tokens, "cls"))[1]
    engine = engine_of(CpuBackend(2, kv="f32"), "tied")
    run(engine, answer(1, tokens, 8))
    for id in (2, 3):
        assert vector(run(engine, asked(id, tokens, "cls"))[id]).tolist() == vector(alone).tolist()
    assert engine.stats().cached_tokens == 0


def test_a_mean_leaves_what_conversations_cached_alone() -> None:
    tokens, _ = golden("tied")
    engine = engine_of(CpuBackend(2), "tied", num_blocks=24)
    run(engine, answer(1, tokens[:32], 1))
    for id in range(2, 8):
        run(engine, asked(id, [id, *tokens[:47]]))
    run(engine, answer(9, tokens[:32], 1))
    assert engine.stats().cached_tokens == 28


@pytest.mark.usefixtures("overcommitted")
@pytest.mark.parametrize("device", BACKENDS)
def test_preempted_means_count_no_token_twice(device: str) -> None:
    """Answers that grow push the embeddings out of a small cache."""
    tokens, wanted = golden("untied")
    engine = engine_of(BACKENDS[device](), "untied", step_tokens=9, max_rows=6, num_blocks=16)
    growing = [answer(id, [id], 40) for id in range(1, 4)]
    ends = run(engine, *growing, asked(4, tokens), asked(5, tokens[:3]), asked(6, tokens))
    assert engine.stats().preemptions
    for id in (4, 6):
        assert np.abs(vector(ends[id]) - wanted["mean"]).max() < 1e-4


def test_only_what_asks_for_it_is_pooled() -> None:
    batches: list[Any] = []

    class Watched(FakeBackend):
        def launch(self, batch: Any) -> int:
            batches.append(batch)
            return super().launch(batch)

    backend = Watched(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    engine = assemble(backend, LIMITS)
    run(engine, answer(1, [1, 2, 3], 3))
    assert all(batch.pools == () for batch in batches)
    prompt = list(range(50))
    ends = run(engine, asked(2, prompt), answer(3, [4, 5], 30))
    assert ends[2].pooled == pooled(prompt, "mean", LIMITS.vocab)
    assert ends[3].pooled == b""
    assert batches[-1].pools == ()
    assert len(batches[3].sampled) == 1  # no logits are made for an embedding


def test_an_embedding_that_is_left_leaves_nothing_to_the_next_of_its_slot() -> None:
    tokens, wanted = golden("linear")
    engine = engine_of(CpuBackend(2, kv="f32"), "linear", step_tokens=8, max_rows=1)
    engine.add(asked(1, tokens))
    engine.step()
    engine.abort(1)
    events: list[Event] = engine.step()
    assert [event.seq for event in events] == [1]
    assert np.abs(vector(run(engine, asked(2, tokens))[2]) - wanted["mean"]).max() < 1e-4


def test_the_default_model_agrees_with_transformers(smollm2: Path) -> None:
    """Its 4-bit weights times activations of 8 bits, beside the widened weights in float32."""
    with np.load(MODELS / "pooled.npz") as file:
        tokens, mean, last = file["smollm2.tokens"].tolist(), file["smollm2.mean"], file["smollm2.last"]
    checkpoint = open_checkpoint(smollm2)
    backend = CpuBackend(2)
    backend.load(load_model(checkpoint, backend))
    backend.reserve_kv(8, 16)
    limits = Limits(max_len=128, max_rows=4, step_tokens=64, block_size=16, num_blocks=8, vocab=checkpoint.spec.vocab)
    ends = run(assemble(backend, limits), asked(1, tokens), asked(2, tokens, "last"))
    for end, wanted in ((ends[1], mean), (ends[2], last)):
        got = vector(end)
        assert got @ wanted / np.linalg.norm(got) / np.linalg.norm(wanted) > 0.995
        assert 0.95 < np.linalg.norm(got) / np.linalg.norm(wanted) < 1.05

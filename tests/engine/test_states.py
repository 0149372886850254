"""Hybrid models through the engine: whatever is reused, preempted or computed beside them, sequences answer as if
alone, and what was reused is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.config import Config
from penstock.core import check
from penstock.core.step_cost import PromptCost
from penstock.engine.assemble import assemble
from penstock.engine.build import build_engine
from penstock.engine.engine import Engine
from penstock.model.load import load_model, open_checkpoint
from penstock.planning.memory_plan import all_states, plan_memory
from penstock.types import Event, Finished, Limits, Request, SamplingParams, Tokens

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
NAMES = ("qwen35", "qwen35moe", "qwen3next", "kimi_linear")
TIERED = {"num_blocks": 16, "states": 1, "host_places": 64, "host_states": 8}  # the device has room for about one
LIMITS = Limits(max_len=64, max_rows=4, step_tokens=24, block_size=4, num_blocks=64, vocab=48, states=8)
BACKENDS: dict[str, Callable[[], Any]] = {"ref": RefBackend, "cpu": lambda: CpuBackend(2, kv="f32")}
GREEDY = SamplingParams(temperature=0)
RNG = np.random.default_rng(7)
SYSTEM = tuple(RNG.integers(48, size=22).tolist())


@pytest.fixture(params=[(name, kind) for name in NAMES for kind in BACKENDS], ids=lambda param: "-".join(param))
def fresh(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Makes engines that have computed nothing yet."""
    name, kind = request.param

    def make(depth: int = 0, **changes: int) -> Engine:
        backend = BACKENDS[kind]()
        backend.load(load_model(open_checkpoint(GOLDENS / name), backend))
        limits = LIMITS._replace(**changes)
        backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits))
        return assemble(backend, limits, depth=depth)

    return make


def answers(engine: Engine, *prompts: tuple[int, ...], count: int = 12) -> tuple[list[list[int]], list[int]]:
    """What follows each prompt, and how much of it was reused."""
    first = engine.stats().steps * 100
    for id, prompt in enumerate(prompts, first):
        engine.add(Request(id, prompt, GREEDY, count))
    said: dict[int, list[int]] = {}
    reused: dict[int, int] = {}
    while not engine.idle:
        for event in engine.step():
            note(event, said, reused)
        check(engine.scheduler)
    return [said[first + i] for i in range(len(prompts))], [reused[first + i] for i in range(len(prompts))]


def note(event: Event, said: dict[int, list[int]], reused: dict[int, int]) -> None:
    if isinstance(event, Tokens):
        said.setdefault(event.seq, []).extend(event.tokens)
    else:
        assert isinstance(event, Finished), event
        assert event.report is not None
        reused[event.seq] = event.report.cached


def test_the_next_turn_computes_what_follows_the_saved_state(fresh: Callable[..., Engine]) -> None:
    engine = fresh()
    (first,), reused = answers(engine, SYSTEM)
    assert reused == [0]
    turn = (*SYSTEM, *first, 3, 1, 4, 1, 5)
    computed = engine.stats().computed_tokens
    said, reused = answers(engine, turn)
    assert reused == [32]  # the answer's state was saved after 32 tokens of all
    assert engine.stats().computed_tokens - computed == len(turn) - 32 + len(said[0]) - 1
    assert said == answers(fresh(), turn)[0]


def test_a_system_prompt_is_computed_once(fresh: Callable[..., Engine]) -> None:
    prompts = [(*SYSTEM, i, i + 1) for i in range(4)]
    engine = fresh()
    said, reused = answers(engine, *prompts)
    assert sorted(reused) == [0, 20, 20, 20]
    assert engine.stats().cached_tokens == 60
    assert said == [answers(fresh(), prompt)[0][0] for prompt in prompts]


@pytest.mark.usefixtures("overcommitted")
@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_and_crowded_they_answer_as_if_alone(fresh: Callable[..., Engine], depth: int) -> None:
    prompts = [SYSTEM[: 5 + 3 * i] for i in range(5)]
    engine = fresh(depth, num_blocks=16, states=2)
    said, _ = answers(engine, *prompts, count=30)
    assert engine.stats().preemptions > 0
    assert said == [answers(fresh(), prompt, count=30)[0][0] for prompt in prompts]


def test_a_prefix_comes_back_from_host_memory_with_its_state(
    fresh: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptCost, "FEW", 10**9)  # of a model as small as these, computing may be faster
    prompts = [(at, *SYSTEM, *SYSTEM) for at in range(3)]
    engine = fresh(**TIERED)
    first = [answers(engine, prompt)[0] for prompt in prompts]
    for prompt, expected in zip(prompts, first, strict=True):
        said, reused = answers(engine, prompt)
        assert reused == [44]
        assert said == expected
    assert dict(engine.stats().reused)["ram"] > 0


def test_a_state_that_was_exported_is_as_good_in_another_backend(fresh: Callable[..., Engine]) -> None:
    one, other = (fresh().backend.states for _ in range(2))
    assert one is not None
    assert other is not None
    size = len(one.export_blocks([0]))
    data = np.random.default_rng(1).bytes(3 * size)
    one.import_blocks([5, 0, 2], data)
    other.import_blocks([1], one.export_blocks([2]))
    assert other.export_blocks([1]) == data[2 * size :]
    one.copy_blocks([(5, 7)])
    assert one.export_blocks([7, 0]) == data[: 2 * size]
    one.touch_blocks([7])
    assert one.export_blocks([7]) == bytes(size)
    assert one.fingerprint() == other.fingerprint()
    with pytest.raises(ValueError, match="bytes"):
        one.import_blocks([1], data)


def test_a_config_leaves_room_for_states() -> None:
    checkpoint = open_checkpoint(GOLDENS / "qwen35")
    has = RefBackend().footprint(checkpoint.spec, checkpoint.tensors.values())
    assert has.state == checkpoint.spec.state_bytes > 0
    config = Config(model="m", device="ref", max_rows=8, step_tokens=16, block_size=4)
    plan = plan_memory(config, checkpoint.spec, has._replace(free=10**6, weights=0, reserve=0))
    assert plan.cache + plan.states <= 10**6
    assert plan.limits.states >= plan.limits.max_rows
    assert any("rows and" in line and "saved" in line for line in plan.lines())
    short = plan_memory(config, checkpoint.spec, has._replace(free=10 * has.state, weights=0, reserve=0))
    assert (short.limits.max_rows, short.limits.states) == (2, 3)
    assert any("2 rows in a step, not 8" in line for line in short.lines())


def test_an_engine_of_a_config_has_states() -> None:
    checkpoint = open_checkpoint(GOLDENS / "qwen35")
    config = Config(model=str(checkpoint.path), device="cpu", threads=2, kv_memory=1 << 20, max_rows=4)
    engine = build_engine(config, checkpoint)
    assert engine.limits.states > 0
    assert answers(engine, SYSTEM)[1] == [0]
    assert answers(engine, (*SYSTEM, 1))[1] == [16]

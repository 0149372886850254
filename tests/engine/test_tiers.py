"""Tests the host tier over real backends: KV that has left the cache and came back answers to the bit, copies are made
only where they pay, and a copy that fails harms nobody later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.backend.fake import FakeBackend, continuation
from penstock.config import configure
from penstock.core import check
from penstock.core.step_cost import PromptCost
from penstock.core.tiers import CopyCosts
from penstock.engine.assemble import assemble
from penstock.engine.build import open_engine
from penstock.engine.engine import Engine
from penstock.engine.host_blocks import HostBlocks
from penstock.errors import ConfigError
from penstock.types import BlockCopy, Event, Failed, Finished, Limits, Report, Request, SamplingParams, Tokens
from tests.engine.one_head import ONE_HEAD

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
OPTIONS = {"threads": 2, "max_rows": 2, "max_len": 64, "block_size": 8, "speculation": "off"}
PROMPT = tuple((7 * at * at + 3 * at) % 29 + 2 for at in range(45))
LIMITS = Limits(max_len=64, max_rows=4, step_tokens=64, block_size=4, num_blocks=16, vocab=100, host_places=64)


@pytest.fixture
def always_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every copy be made: of a model as small as these, computing may be faster."""
    monkeypatch.setattr(PromptCost, "FEW", 10**9)


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    return events


def answer(engine: Engine, id: int, prompt: tuple[int, ...], count: int = 8) -> tuple[list[Any], Report]:
    """Returns the tokens of an answer, with their logprobs where the backend is a real one, and its report."""
    logprobs = None if isinstance(engine.backend, FakeBackend) else 3
    engine.add(Request(id, prompt, SamplingParams(temperature=0, logprobs=logprobs), count))
    events = drain(engine)
    tokens = [event for event in events if isinstance(event, Tokens)]
    told = [each for event in tokens for each in (event.logprobs or event.tokens)]
    (end,) = (event for event in events if isinstance(event, Finished))
    assert end.report is not None
    return told, end.report


def crowd_out(engine: Engine, first: int) -> None:
    """Runs prompts that fill the cache, so that whatever was idle has left it."""
    for id in range(first, first + 3):
        answer(engine, id, tuple((at + 3 * id) % 31 + 1 for at in range(50)))


def engine_over(backend: FakeBackend) -> Engine:
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return assemble(backend, LIMITS)


@pytest.mark.parametrize(
    ("name", "device", "options"),
    [
        ("llama3", "cpu", {}),
        ("llama3", "ref", {}),
        ("llama3", "cpu", {"kv": "int8"}),
        ("untied", "cpu", {"kv": "int8:int4", "config": ONE_HEAD}),
        ("untied", "cpu", {"kv": "int4", "config": ONE_HEAD}),
        ("gemma3", "cpu", {}),
        ("gemma3", "ref", {}),
        ("deepseek_v3", "cpu", {}),
        ("gpt_oss", "cpu", {}),
        ("qwen3next", "cpu", {}),
        ("qwen3next", "ref", {}),
        ("bamba", "cpu", {}),
        ("lfm2", "cpu", {}),
        ("kimi_linear", "cpu", {}),
    ],
)
@pytest.mark.usefixtures("always_copies")
def test_what_came_back_answers_to_the_bit(name: str, device: str, options: dict[str, Any]) -> None:
    engine = open_engine(configure(GOLDENS / name, OPTIONS | options | {"device": device, "kv_ram": 1 << 20}))
    first, before = answer(engine, 1, PROMPT)
    assert before.reused == ()
    crowd_out(engine, 2)
    again, after = answer(engine, 20, PROMPT)
    assert dict(after.reused)["ram"] > 0
    assert sum(dict(after.reused).values()) == after.cached == 40
    repeated, third = answer(engine, 21, PROMPT)
    assert third.reused == (("device", 40),)
    assert again == repeated
    assert again == first or device == "ref"  # whose sums depend on how prompts are cut
    stats = engine.stats()
    assert sum(dict(stats.reused).values()) == stats.cached_tokens
    assert stats.copied_out >= stats.copied_in > 0
    assert 0 < stats.host_blocks <= stats.host_places
    check(engine.scheduler)
    engine.close()


@pytest.mark.usefixtures("always_copies")
def test_without_ram_everything_is_computed_again() -> None:
    engine = open_engine(configure(GOLDENS / "llama3", OPTIONS | {"device": "cpu", "kv_ram": 0}))
    first, _ = answer(engine, 1, PROMPT)
    crowd_out(engine, 2)
    again, after = answer(engine, 20, PROMPT)
    assert (again, after.cached, after.reused) == (first, 0, ())
    assert engine.stats().host_places == engine.stats().copied_out == 0


@pytest.mark.parametrize("given", [-1, "much", 1.5, True])
def test_no_other_bytes_can_be_asked_for(given: Any) -> None:
    with pytest.raises(ConfigError, match="kv_ram is auto, or bytes such as"):
        configure(GOLDENS / "llama3", {"kv_ram": given})


def test_host_memory_is_divided_between_blocks_and_states() -> None:
    engine = open_engine(configure(GOLDENS / "bamba", OPTIONS | {"device": "cpu", "kv_ram": 1 << 20}))
    limits, backend = engine.limits, engine.backend
    assert backend.states is not None
    state, block = len(backend.states.export_blocks([0])), 8 * backend.memory_needs().kv_bytes_per_token
    assert limits.host_states == (1 << 19) // state > 0
    assert limits.host_places == ((1 << 20) - limits.host_states * state) // block > 0
    one = open_engine(configure(GOLDENS / "bamba", OPTIONS | {"device": "cpu", "kv_ram": state + 3 * block}))
    assert (one.limits.host_states, one.limits.host_places) == (1, 3)
    none = open_engine(configure(GOLDENS / "bamba", OPTIONS | {"device": "cpu", "kv_ram": state - 1}))
    assert (none.limits.host_states, none.limits.host_places) == (0, (state - 1) // block)


@pytest.mark.usefixtures("always_copies")
def test_a_step_that_waits_for_blocks_does_not_tell_what_tokens_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(configure(GOLDENS / "llama3", OPTIONS | {"device": "cpu", "kv_ram": 1 << 20}))
    answer(engine, 1, PROMPT)
    crowd_out(engine, 2)
    observed: list[int] = []
    monkeypatch.setattr(engine.pipeline.costs, "observe", lambda rows, *others, **more: observed.append(rows[0].start))
    _, report = answer(engine, 20, PROMPT)
    assert dict(report.reused)["ram"] == 40
    assert observed == [45, 46, 47, 48, 49, 50, 51]  # its first step is missing, which began at position 40


# -- what copies cost --------------------------------------------------------------------------------------------


def measured(seconds: float) -> PromptCost:
    """Returns what is known after prompts that took so many seconds a token."""
    prompts = PromptCost()
    for _ in range(PromptCost.FEW):
        prompts.observe(100, 5000.0, 100 * seconds)
    return prompts


def test_blocks_are_copied_only_where_that_is_no_slower_than_computing() -> None:
    costs = CopyCosts(measured(0.001))
    costs.observe("in", 4, 4 * 0.01)
    costs.observe("out", 4, 4 * 0.01)
    assert costs.pays_to_load(tokens=16, context=0, blocks=1)
    assert not costs.may_pay_to_keep(tokens=16, context=0, blocks=1)  # out and in again takes 20 ms, computing 16
    assert not costs.pays_to_load(tokens=16, context=0, blocks=2)
    for _ in range(200):
        costs.observe("in", 1, 0.1)
    assert costs.seconds("in", 1) == pytest.approx(0.1, rel=0.01)
    assert not costs.pays_to_load(tokens=16, context=0, blocks=1)


@pytest.mark.parametrize("pays", [True, False])
def test_what_would_be_slower_to_copy_is_computed(pays: bool) -> None:
    engine = engine_over(FakeBackend(LIMITS.vocab))
    costs = engine.scheduler.cache._costs
    costs._prompts = measured(1.0 if pays else 0.0)
    first, _ = answer(engine, 1, PROMPT)
    crowd_out(engine, 2)
    again, report = answer(engine, 20, PROMPT)
    assert again == first == continuation(PROMPT, 8, LIMITS.vocab)
    assert dict(report.reused) == ({"ram": 44} if pays else {})
    assert (engine.stats().copied_out > 0) is pays


def test_what_is_on_the_host_is_computed_again_if_copying_has_become_slow() -> None:
    engine = engine_over(FakeBackend(LIMITS.vocab))
    costs = engine.scheduler.cache._costs
    costs._prompts = measured(1.0)
    first, _ = answer(engine, 1, PROMPT)
    crowd_out(engine, 2)
    costs._prompts = measured(0.0)
    again, report = answer(engine, 20, PROMPT)
    assert again == first
    assert (report.cached, engine.stats().copied_in) == (0, 0)
    check(engine.scheduler)
    costs._prompts = measured(1.0)
    assert answer(engine, 21, PROMPT)[1].reused == (("device", 44),)
    check(engine.scheduler)


# -- failures and places -----------------------------------------------------------------------------------------


class BreaksOnce(FakeBackend):
    """Fails to import blocks once."""

    def break_next(self) -> None:
        self._import = self.kv.import_blocks
        self.kv.import_blocks = self._fail  # type: ignore[method-assign]

    def _fail(self, blocks: Any, data: bytes) -> None:
        self.kv.import_blocks = self._import  # type: ignore[method-assign]
        raise MemoryError("no room to copy blocks")


@pytest.mark.usefixtures("always_copies")
def test_a_copy_that_fails_fails_its_request_and_what_follows_is_right() -> None:
    backend = BreaksOnce(LIMITS.vocab)
    engine = engine_over(backend)
    answer(engine, 1, PROMPT)
    crowd_out(engine, 2)
    backend.break_next()
    engine.add(Request(20, PROMPT, SamplingParams(temperature=0), 8))
    (failed,) = drain(engine)
    assert isinstance(failed, Failed)
    assert (failed.seq, failed.code) == (20, "step_failed")
    assert "no room to copy blocks" in failed.message
    check(engine.scheduler)
    assert engine.stats().blocks_free == LIMITS.num_blocks
    assert engine.stats().host_blocks == 0
    assert answer(engine, 21, PROMPT)[0] == continuation(PROMPT, 8, LIMITS.vocab)


@pytest.mark.usefixtures("always_copies")
def test_a_flushed_cache_has_nothing_on_the_host_either() -> None:
    engine = engine_over(FakeBackend(LIMITS.vocab))
    answer(engine, 1, PROMPT)
    crowd_out(engine, 2)
    assert engine.stats().host_blocks > 0
    engine.flush_cache()
    check(engine.scheduler)
    assert engine.stats().host_blocks == 0
    assert answer(engine, 20, PROMPT)[1].cached == 0


def test_a_place_holds_what_was_written_to_it() -> None:
    backend = FakeBackend(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    stored = HostBlocks(LIMITS, backend.kv, CopyCosts())
    data = bytes(range(stored.block_bytes))
    stored.write(3, data)
    assert bytes(stored.read(3)) == data


@pytest.mark.parametrize("places", [(2, 3, 4), (4, 3, 2), (1, 5, 9)])
def test_places_are_copied_in_neighbours_or_not(places: tuple[int, ...]) -> None:
    backend = FakeBackend(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    host = HostBlocks(LIMITS, backend.kv, CopyCosts())
    contents = [bytes([place]) * host.block_bytes for place in places]
    for place, data in zip(places, contents, strict=True):
        host.write(place, data)
    host.carry_out([BlockCopy(10 + at, place, "in") for at, place in enumerate(places)])
    assert [backend.kv.export_blocks([10 + at]) for at in range(len(places))] == contents

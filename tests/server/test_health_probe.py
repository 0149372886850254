"""/health?generate=1 is 200 only if the engine has generated something, and costs little however many ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from penstock.engine.assemble import assemble
from penstock.errors import EngineUnavailable
from penstock.ipc.inprocess import InProcessClient
from penstock.server.status import health_probe
from penstock.server.status.health_probe import GenerateProbes
from penstock.types import Aborted, Event, Finished, Hello, Request, Stats, Tokens
from tests.server import toys

MODEL = "toy/parrot"
HELLO = Hello("1", 7, "m", toys.LIMITS)
Answer = Callable[["StandIn"], list[list[Event]] | None]


class StandIn:
    """Is a client whose engine answers as it is told; with None it does not answer."""

    def __init__(self, answer: Answer, hello: Hello = HELLO) -> None:
        self.hello, self.stats = hello, Stats()
        self.asked: list[Request] = []
        self.left = 0
        self._answer = answer

    def next_id(self) -> int:
        return len(self.asked) + 1

    async def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        self.asked.append(request)
        answer = self._answer(self)
        try:
            if answer is None:
                await asyncio.Event().wait()
            for events in answer or ():
                yield events
        finally:
            self.left += 1


def checked(client: Any) -> str:
    return asyncio.run(GenerateProbes().check(client))


TOKEN: list[list[Event]] = [[Tokens(1, (5,)), Finished(1, "length")]]


def test_a_token_is_generated_before_all_others() -> None:
    client = StandIn(lambda _: TOKEN)
    assert checked(client) == "probe"
    (asked,) = client.asked
    assert (asked.max_tokens, asked.pooling, asked.priority < -(10**6)) == (1, "", True)


def test_an_engine_without_text_makes_an_embedding() -> None:
    hello = HELLO._replace(limits=toys.LIMITS._replace(generates=False, pooling="cls"))
    client = StandIn(lambda _: [[Finished(1, "pooled", pooled=b"1234")]], hello)
    assert checked(client) == "probe"
    assert (client.asked[0].max_tokens, client.asked[0].pooling) == (0, "cls")
    with pytest.raises(EngineUnavailable, match="without having generated anything"):
        checked(StandIn(lambda _: [[Finished(1, "pooled")]], hello))


@pytest.mark.parametrize("end", [Finished(1, "length"), Aborted(1), Tokens(1, ())])
def test_an_end_without_a_token_is_no_health(end: Event) -> None:
    with pytest.raises(EngineUnavailable, match="without having generated anything"):
        checked(StandIn(lambda _: [[end]]))


def test_an_engine_that_does_not_answer_in_time_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_probe, "GENERATE_SECONDS", 0.2)

    async def scenario() -> None:
        client: Any = StandIn(lambda _: None)
        with pytest.raises(EngineUnavailable, match="has generated no token within"):
            await GenerateProbes().check(client)
        while not client.left:  # what was asked in vain is not left in the engine
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_an_engine_that_is_busy_with_others_is_healthy() -> None:
    def work(client: StandIn) -> None:
        client.stats = Stats(generated_tokens=5)

    assert checked(StandIn(work)) == "requests"


def test_an_engine_that_computes_nothing_is_not_saved_by_its_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_probe, "GENERATE_SECONDS", 0.2)
    client = StandIn(lambda _: None)
    client.stats = Stats(generated_tokens=1000)
    with pytest.raises(EngineUnavailable, match="has generated no token"):
        checked(client)


def test_all_who_ask_at_once_and_soon_after_share_one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_probe, "FRESH_SECONDS", 1000.0)

    async def scenario() -> None:
        client: Any = StandIn(lambda _: TOKEN)
        probes = GenerateProbes()
        leaves = asyncio.create_task(probes.check(client))
        await asyncio.sleep(0)
        leaves.cancel()
        assert await asyncio.gather(*(probes.check(client) for _ in range(50))) == ["probe"] * 50
        assert await probes.check(client) == "probe"
        assert len(client.asked) == 1
        monkeypatch.setattr(health_probe, "FRESH_SECONDS", 0.0)
        await probes.check(client)
        assert len(client.asked) == 2

    asyncio.run(scenario())


class Broken(toys.Parrot):
    """Fails every step."""

    def launch(self, batch: Any) -> int:
        raise RuntimeError("no step succeeds")


def test_a_step_that_fails_is_503_at_once(serve: Any) -> None:
    broken: Any = Broken(toys.LIMITS)
    with serve(InProcessClient(lambda: assemble(broken, toys.LIMITS), "parrot"), toys.ToyText(), MODEL) as server:
        assert server.get("/health").status_code == 200
        answer = server.get("/health?generate=1")
        assert answer.status_code == 503
        told = answer.json()
        assert (told["status"], told["engine"]) == ("failed", None)
        assert "no step succeeds" in told["message"]


def test_a_full_engine_is_healthy(slow_parrot: Any) -> None:
    """All its rows are taken by answers without end, and more wait."""
    with slow_parrot.http.stream(
        "POST", "/v1/completions", json={"model": MODEL, "prompt": ["[*abc]"] * 20, "stream": True, "max_tokens": 9000}
    ) as answer:
        slow_parrot.until(lambda: slow_parrot.client.stats.running == toys.LIMITS.max_rows)
        health = slow_parrot.get("/health?generate=1")
        assert health.status_code == 200
        assert health.json()["models"][0]["generated"] in ("probe", "requests")
        answer.close()

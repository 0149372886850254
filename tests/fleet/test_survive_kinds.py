"""One of three replicas is killed amid streams of every kind: sampled and constrained in every way, of every dialect.
No answer is lost, and none differs from the one without the kill."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from penstock.fleet.client import FleetClient
from penstock.ipc.launchers import SpawnLauncher
from penstock.types import Event, Finished, Request
from tests.engine.test_ipc import run
from tests.engine.test_resume import Answer, answers, babbling, computing, constrained, steered
from tests.fleet.fleets import Keepers, fleet, until_ready
from tests.fleet.test_client import until
from tests.fleet.test_survive import engines_in_use
from tests.server.conftest import serving
from tests.server.test_restart import CHAT, MODEL, SAID, STREAMS, stream, uncounted
from tests.server.toys import ToyText

KINDS = SpawnLauncher((sys.executable, "-m", "tests.fleet.kind_host"))


async def follow(client: FleetClient, request: Request) -> Answer:
    said = Answer()
    async for events in client.submit(request._replace(id=client.next_id())):
        for event in events:
            said = said.plus(_without_forced(event))
    return said


def _without_forced(event: Event) -> Event:
    """Returns an event without what a report counts in its own engine only."""
    if isinstance(event, Finished) and event.report is not None:
        return event._replace(report=event.report._replace(forced=0))
    return event


@pytest.mark.parametrize("kind", ["sampling", "grammars"])
def test_however_answers_are_made(kind: str) -> None:
    asked = steered() if kind == "sampling" else constrained()
    whole = answers(computing() if kind == "sampling" else babbling(), asked)

    async def scenario() -> None:
        async with fleet(3, launcher=KINDS, models=(kind,) * 3) as (client, keepers):
            await until_ready(client, 3)
            tasks = [asyncio.create_task(follow(client, request)) for request in asked]
            for _ in range(2):
                enough = client.stats.generated_tokens + 4 * len(asked)
                await until(
                    lambda enough=enough: client.stats.generated_tokens > enough or all(task.done() for task in tasks)
                )
                keepers.kill(min(engines_in_use(client), default="fake-0"))
            for request, task in zip(asked, tasks, strict=True):
                said = await task
                assert said._replace(forced=0) == whole[request.id]._replace(forced=0), request
            await until(lambda: client.restarts >= 1)

    run(scenario())


def test_no_stream_of_any_dialect_is_lost_or_different() -> None:
    keepers = Keepers(3, launcher=KINDS, models=("parrot",) * 3, name=MODEL)
    with serving(FleetClient(keepers), ToyText(), MODEL) as server:
        alone = {name: stream(server, name) for name in STREAMS}
        texts = [f"{number} " * 60 for number in range(20)]

        def ask() -> Any:
            vectors = server.sdk().embeddings.create(model=MODEL, input=texts).data
            said = server.sdk().chat.completions.create(model=MODEL, messages=CHAT, n=3)  # type: ignore[call-overload]
            return [vector.embedding for vector in vectors], [choice.message.content for choice in said.choices]

        whole = ask()
        assert whole[1] == [SAID] * 3
        with ThreadPoolExecutor(2 * len(STREAMS)) as pool:
            asked = {(name, turn): pool.submit(stream, server, name) for turn in range(2) for name in STREAMS}
            others = [pool.submit(ask) for _ in range(2)]
            for number in range(2):
                enough = server.client.stats.generated_tokens + 200
                server.until(
                    lambda enough=enough: (  # type: ignore[misc]
                        server.client.stats.generated_tokens > enough or all(map(Future.done, asked.values()))
                    )
                )
                keepers.kill(f"fake-{number}")
            for (name, _), asking in asked.items():
                assert uncounted(asking.result()) == uncounted(alone[name]), name
            assert [asking.result() for asking in others] == [whole] * 2
        assert 'reason="error"' not in server.get("/metrics").text

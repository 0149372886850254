"""Engines that stop answering without closing anything: requests go on elsewhere, and later ones do not wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.fleet.foreign import engine as foreign_engine
from penstock.fleet.foreign.engine import EngineHealth, ForeignEngine, parse_engine
from tests.fleet.foreign.faulty import Fault, FaultyLine, faulty_line
from tests.fleet.foreign.scripted import ScriptedEngine, chat, engine, gateway, moved, states
from tests.server.conftest import Server

WORDS = ["one ", "two ", "three"]


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_engine, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(foreign_engine, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(foreign_engine, "LOST_SECONDS", 0.1)


@pytest.fixture
def first() -> Iterator[ScriptedEngine]:
    with engine(kind="vllm") as scripted:
        yield scripted


@pytest.fixture
def second() -> Iterator[ScriptedEngine]:
    with engine(kind="vllm") as scripted:
        yield scripted


@pytest.fixture
def line(first: ScriptedEngine) -> Iterator[FaultyLine]:
    with faulty_line(first.url) as line:
        yield line


@pytest.fixture
def server(line: FaultyLine, second: ScriptedEngine) -> Iterator[Server]:
    """Asks the first engine as long as it is there."""
    with gateway(f"{line.url},name=first", f"{second.url},name=second,priority=1") as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.HALF_OPEN, Fault.DRIP])
def test_requests_leave_a_silent_engine_until_it_answers_a_probe(
    first: ScriptedEngine, second: ScriptedEngine, line: FaultyLine, server: Server, fault: Fault, stream: bool
) -> None:
    assert chat(server, stream=stream).status_code == 200
    line.fault = fault
    answers = [chat(server, stream=stream) for _ in range(3)]
    assert [each.status_code for each in answers] == [200] * 3
    assert all(all(word in each.text for word in WORDS) for each in answers) if stream else True
    assert states(server) == {"first": "down", "second": "ready"}
    assert len(second.bodies) == 3
    assert len(first.bodies) <= 2  # the one before the fault, and the one that found it
    line.fault = Fault.NONE
    server.until(lambda: states(server)["first"] == "ready")
    assert chat(server, stream=stream).status_code == 200
    assert len(second.bodies) == 3


def test_a_stream_leaves_an_engine_that_falls_silent_in_its_middle(
    first: ScriptedEngine, second: ScriptedEngine, line: FaultyLine, server: Server
) -> None:
    first.pause = 0.2
    second.words = ("and so on",)
    text = ""
    for chunk in server.sdk().chat.completions.create(
        model="m", messages=[{"role": "user", "content": ""}], stream=True
    ):
        line.fault = Fault.SILENT
        text += chunk.choices[0].delta.content or ""
    assert text.endswith("and so on")
    assert second.bodies[0]["messages"][-1]["content"] == text.removesuffix("and so on")
    assert moved(server, "resumed") == 1


def test_a_busy_engine_that_serves_no_more_connections_is_not_given_up(
    first: ScriptedEngine, second: ScriptedEngine, line: FaultyLine, server: Server
) -> None:
    """Probes have a connection of their own, which is served before any request can take its place."""
    with ThreadPoolExecutor(2) as pool:
        first.held = True
        asked = [pool.submit(chat, server)]
        server.until(lambda: bool(first.bodies))
        line.fault = Fault.FULL
        asked.append(pool.submit(chat, server))
        probed = first.probed
        server.until(lambda: first.probed >= probed + 10 or bool(second.bodies))
        assert states(server)["first"] == "ready"
        line.fault = Fault.NONE
        first.held = False
        assert [each.result().status_code for each in asked] == [200, 200]
    assert not second.bodies


@pytest.mark.parametrize("stream", [False, True])
def test_idle_engines_share_a_load_of_one_prompt(first: ScriptedEngine, second: ScriptedEngine, stream: bool) -> None:
    """The engine that computes a prompt first would have it for all others, but it also would have all the work."""
    first.held = second.held = True
    messages = [{"role": "user", "content": "word " * 2000}]
    with gateway(first.url, second.url) as server, ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(chat, server, messages=messages, stream=stream) for _ in range(24)]
        server.until(lambda: len(first.bodies) + len(second.bodies) == 24)
        first.held = second.held = False
        assert all(each.result().status_code == 200 for each in answers)
    assert min(len(first.bodies), len(second.bodies)) >= 10


def test_a_gateway_that_stood_still_itself_blames_no_engine() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            body = b'{"data": [{"id": "m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def look() -> EngineHealth:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            watched = ForeignEngine(0, parse_engine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            asyncio.get_running_loop().call_soon(time.sleep, 2 * foreign_engine.PROBE_SECONDS)
            await watched.look()
            watched.close()
            return watched.health

    assert asyncio.run(look()) is EngineHealth.READY

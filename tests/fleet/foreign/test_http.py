"""The HTTP client of other engines, on both event loops that a server may run on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from penstock.fleet.foreign.http import EngineHttp, EngineLost, parse_url

ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


def uv_loop() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return loop


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uv_loop])
def test_answers_are_read_and_connections_used_again(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(4) == b"body"
            writer.write(ANSWER)

    async def ask() -> list[bytes]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            http = EngineHttp(parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            found = [await (await http.request("POST", "/", b"body", 5.0)).read(5.0) for _ in range(3)]
            http.close()
            return found

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(ask()) == [b"firstsecond"] * 3
    assert connections == 1


@pytest.mark.parametrize(("silence", "alive"), [(0.6, True), (None, False)])
def test_an_engine_that_falls_silent_is_given_up(
    monkeypatch: pytest.MonkeyPatch, silence: float | None, alive: bool
) -> None:
    """Each chunk is waited for as long, however many came before; one that is known to be dead sooner."""
    monkeypatch.setattr("penstock.fleet.foreign.http.TICK_SECONDS", 0.2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(4):
            writer.write(b"4\r\npart\r\n")
            await asyncio.sleep(0.05)
        await reader.read()
        writer.close()

    async def ask() -> tuple[bytes, float, str]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            http = EngineHttp(parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            answer = await http.request("GET", "/", seconds=5.0)
            read, since = b"", time.monotonic()
            try:
                async for part in answer.chunks(silence, lambda: alive):
                    read += part
                    since = time.monotonic()
            except EngineLost as error:
                return read, time.monotonic() - since, str(error)
            return read, 0.0, ""

    read, waited, why = asyncio.run(ask())
    assert read == b"part" * 4
    assert waited >= (silence or 0.2) - 0.01
    assert "sent nothing for" in why

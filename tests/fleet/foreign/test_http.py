"""The HTTP client of other engines, on both event loops that a server may run on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.fleet.foreign.http import EngineHttp, EngineLost, parse_url

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = HEAD + b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


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
            http = _client(server)
            found = [await (await http.request("POST", "/", b"body", 5.0)).read(5.0) for _ in range(3)]
            http.close()
            return found

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(ask()) == [b"firstsecond"] * 3
    assert connections == 1


def test_an_engine_that_falls_silent_is_given_up() -> None:
    """Each chunk is waited for as long, however many came before."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for _ in range(4):
            writer.write(b"4\r\npart\r\n")
            await asyncio.sleep(0.05)
        await reader.read()
        writer.close()

    async def ask() -> tuple[bytes, float, str]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            answer = await _client(server).request("GET", "/", seconds=5.0)
            read, since = b"", time.monotonic()
            try:
                async for part in answer.chunks(0.6):
                    read += part
                    since = time.monotonic()
            except EngineLost as error:
                return read, time.monotonic() - since, str(error)
            return read, 0.0, ""

    read, waited, why = asyncio.run(ask())
    assert read == b"part" * 4
    assert waited >= 0.59
    assert "sent nothing for" in why


def test_silent_answers_are_given_up_and_those_that_flow_are_not() -> None:
    """One answer has no headers, one drips, and one flows: it alone is read on."""
    waiting: dict[bytes, asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        waiting[path] = writer
        if path != b"/silent":
            writer.write(HEAD)
        await reader.read()
        writer.close()

    async def read(http: EngineHttp, path: str) -> bytes | str:
        try:
            return await (await http.request("GET", path)).read(60.0)
        except EngineLost as error:
            return str(error)

    async def ask() -> list[bytes | str]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            http = _client(server)
            asked = [asyncio.create_task(read(http, path)) for path in ("/silent", "/drip", "/flow")]
            while len(waiting) < 3:
                await asyncio.sleep(0.005)
            before = http.received()
            waiting[b"/drip"].write(b"1\r\n.\r\n")
            waiting[b"/flow"].write(b"64\r\n" + b"." * 100 + b"\r\n")
            flowing = [
                each for each in before if each._transport.get_extra_info("sockname") == _peer(waiting[b"/flow"])
            ]
            while not flowing[0].received - before[flowing[0]] >= 100:
                await asyncio.sleep(0.005)
            http.give_up_silent(before, "given up")
            assert [await each for each in asked[:2]] == ["given up"] * 2
            waiting[b"/flow"].write(b"0\r\n\r\n")
            return [await each for each in asked]

    assert asyncio.run(ask()) == ["given up", "given up", b"." * 100]


def _client(server: asyncio.Server) -> EngineHttp:
    return EngineHttp(parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))


def _peer(writer: asyncio.StreamWriter) -> Any:
    return writer.get_extra_info("peername")

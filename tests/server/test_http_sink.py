"""Tests that chunks reach a client in order, whether it keeps up, reads slowly or has another HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.server.context.request_context import RequestContext
from penstock.server.http.sse import HttpSink

START = {"type": "http.response.start", "status": 200, "headers": []}


class Connection:
    """Keeps what is sent, by `send` or by `write`. A client that does not read holds up both."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message.get("body", "start") if message.get("more_body", True) else "end")

    def write(self, body: bytes) -> bool:
        if self.reads.is_set():
            self.sent.append(body + b" at once")
        return self.reads.is_set()


def sink_of(connection: Connection, *, writes: bool = True) -> HttpSink:
    context = RequestContext(send=connection.send, write=connection.write if writes else None)
    return HttpSink(START, connection.send, context)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_first_chunk_comes_after_the_headers_and_later_ones_at_once() -> None:
    async def test() -> None:
        connection = Connection()
        sink = sink_of(connection)
        assert not sink.begun
        sink.put(b"a")
        sink.put(b"b")
        assert sink.begun
        await turns()
        assert connection.sent == ["start", b"a", b"b"]
        sink.put(b"c")
        assert connection.sent[3:] == [b"c at once"]
        await sink.end()
        assert connection.sent[4:] == ["end"]

    asyncio.run(test())


def test_what_a_slow_client_has_not_read_comes_before_what_is_new() -> None:
    async def test() -> None:
        connection = Connection()
        sink = sink_of(connection)
        await sink.send(b"a")
        connection.reads.clear()
        sink.put(b"b")
        sink.put(b"c")
        waiting = asyncio.create_task(sink.send(b"d"))
        await turns()
        assert connection.sent == ["start", b"a"]
        assert not waiting.done()  # whoever can wait does
        connection.reads.set()
        sink.put(b"e")
        await waiting
        await sink.end()
        assert connection.sent[2:] == [b"b", b"c", b"d", b"e", "end"]

    asyncio.run(test())


def test_a_server_that_can_only_send_is_sent_everything() -> None:
    async def test() -> None:
        connection = Connection()
        sink = sink_of(connection, writes=False)
        for chunk in (b"a", b"b"):
            await sink.send(chunk)
        await sink.end()
        assert connection.sent == ["start", b"a", b"b", "end"]

    asyncio.run(test())


def test_nothing_more_is_sent_to_a_client_that_has_left() -> None:
    async def test() -> None:
        connection = Connection()
        sink = sink_of(connection)
        connection.reads.clear()
        sink.put(b"a")
        await turns()
        sink.leave()
        connection.reads.set()
        await turns()
        assert connection.sent == []

    asyncio.run(test())


def test_an_error_of_sending_is_raised_at_the_end() -> None:
    async def test() -> None:
        async def broken(_: Any) -> None:
            raise RuntimeError("Invalid HTTP header value.")

        sink = HttpSink(START, broken, RequestContext())
        sink.put(b"a")
        await turns()
        sink.put(b"b")
        with pytest.raises(RuntimeError, match="header"):
            await sink.end()

    asyncio.run(test())

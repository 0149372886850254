"""Tests how the events of requests reach their readers, without an engine: at once, in order, and each its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock.ipc.dispatch import Dispatch
from penstock.ipc.streams import RequestStreams
from penstock.types import Event, Failed, Finished, Request, SamplingParams, Tokens
from penstock.types.messages import Abort, Add, Message


class Sent:
    """Is an engine that keeps what it is sent, and the only one to choose from."""

    in_line = 0

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def place(self, *_: object) -> Dispatch:
        return Dispatch(self)

    def quietest(self) -> Sent:
        return self

    def trial(self, *_: object) -> Dispatch:
        return Dispatch(self)

    def forget(self, *_: object) -> None: ...


def asked(id: int) -> Request:
    return Request(id, (1,), SamplingParams(), 10)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_events_are_read_when_they_are_delivered_and_the_last_ends_it() -> None:
    async def test() -> None:
        engine, got = Sent(), list[list[Event]]()
        streams = RequestStreams(engine)
        running = asyncio.create_task(streams.run(asked(1), got.append))
        await asyncio.sleep(0)
        assert engine.messages == [Add(asked(1))]
        streams.deliver(engine, [Tokens(1, (5,)), Tokens(2, (6,))])
        assert got == [[Tokens(1, (5,))]]  # no turn of the event loop has passed
        streams.deliver(engine, [Tokens(1, (7,)), Finished(1, "length")])
        await running
        assert got[1:] == [[Tokens(1, (7,)), Finished(1, "length")]]
        assert (len(streams), engine.messages) == (0, [Add(asked(1))])

    run(test())


class Panic(BaseException):
    """Is what a library in Rust raises when it has a bug."""


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("x"), ValueError), (StopIteration(), RuntimeError), (Panic("x"), Panic)],
)
@pytest.mark.parametrize("leaves", [False, True])
def test_a_reader_that_fails_ends_its_own_request_only(error: BaseException, raised: type, leaves: bool) -> None:
    async def test() -> None:
        engine, got = Sent(), list[list[Event]]()
        streams = RequestStreams(engine)

        def fail(_: list[Event]) -> None:
            if leaves:
                failing.cancel()
            raise error

        failing = asyncio.create_task(streams.run(asked(1), fail))
        other = asyncio.create_task(streams.run(asked(2), got.append))
        await asyncio.sleep(0)
        streams.deliver(engine, [Tokens(1, (5,)), Tokens(2, (6,))])
        with pytest.raises(asyncio.CancelledError if leaves else raised):
            await failing
        assert engine.messages[2:] == [Abort(1)]
        streams.deliver(engine, [Finished(2, "stop")])
        await other
        assert got == [[Tokens(2, (6,))], [Finished(2, "stop")]]

    run(test())


@pytest.mark.parametrize("by", ["reader", "cancelling"])
def test_leaving_early_aborts_and_nothing_is_read_after_it(by: str) -> None:
    async def test() -> None:
        engine, got = Sent(), list[list[Event]]()
        streams = RequestStreams(engine)

        def read(events: list[Event]) -> bool:
            got.append(events)
            return by == "reader"

        running = asyncio.create_task(streams.run(asked(1), read))
        await asyncio.sleep(0)
        streams.deliver(engine, [Tokens(1, (5,))])
        if by == "cancelling":
            running.cancel()
            await asyncio.sleep(0)
        streams.deliver(engine, [Tokens(1, (6,))])
        await asyncio.wait({running})
        assert (got, engine.messages[1:], len(streams)) == ([[Tokens(1, (5,))]], [Abort(1)], 0)

    run(test())


def test_what_a_lost_client_is_told_ends_it() -> None:
    async def test() -> None:
        engine, got = Sent(), list[list[Event]]()
        streams = RequestStreams(engine)
        running = asyncio.create_task(streams.run(asked(1), got.append))
        await asyncio.sleep(0)
        streams.fail("engine_died", "it died")
        await running
        assert got == [[Failed(1, "engine_died", "it died")]]

    run(test())

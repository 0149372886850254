"""Tests that what is written in one turn of the event loop is sent at once, in order and wholly."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.server.access.lingering import MOST_COLLECTED, LingeringTransport, TurnWrites


class Recorded:
    """Notes what a transport is asked to do."""

    unread = False

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True


def calls_of(*turns: list[bytes | str]) -> list[Any]:
    """Returns what reaches the transport when these things are written or called, turn by turn."""

    async def run() -> list[Any]:
        recorded = Recorded()
        transport = LingeringTransport(recorded, recorded, TurnWrites())  # type: ignore[arg-type]
        for turn in turns:
            for each in turn:
                if isinstance(each, bytes):
                    transport.write(each)
                else:
                    getattr(transport, each)()
            await asyncio.sleep(0)
        return recorded.calls

    return asyncio.run(run())


def test_a_turns_writes_are_one() -> None:
    assert calls_of([b"head", b"first"], [b"second"], [], [b"third", b"end"]) == [b"headfirst", b"second", b"thirdend"]


def test_what_was_written_comes_before_the_end() -> None:
    assert calls_of([b"answer", b"end", "close"], [b"late"])[:2] == [b"answerend", "close"]
    assert calls_of([b"answer", "abort"]) == ["abort"]


def test_much_is_not_kept_until_the_turn_ends() -> None:
    much = bytes(MOST_COLLECTED)
    assert calls_of([b"head", much, b"rest", "close"]) == [b"head" + much, b"rest", "close"]


def test_nothing_is_sent_to_a_client_that_has_left_meanwhile() -> None:
    async def run() -> list[Any]:
        recorded = Recorded()
        transport = LingeringTransport(recorded, recorded, TurnWrites())  # type: ignore[arg-type]
        transport.write(b"answer")
        recorded.closed = True
        await asyncio.sleep(0)
        return recorded.calls

    assert asyncio.run(run()) == []


def test_a_client_that_does_not_read_is_written_no_chunk() -> None:
    async def run() -> list[Any]:
        recorded = Recorded()
        transport = LingeringTransport(recorded, recorded, TurnWrites())  # type: ignore[arg-type]
        written = [transport.write_chunk(b"0123456789abcdef"), transport.write_chunk(b"")]
        transport.paused = True
        written.append(transport.write_chunk(b"late"))
        await asyncio.sleep(0)
        return [*written, *recorded.calls]

    assert asyncio.run(run()) == [True, True, False, b"10\r\n0123456789abcdef\r\n"]


def test_a_connection_that_fails_does_not_keep_others_from_being_written_to() -> None:
    class Broken(Recorded):
        def write(self, data: bytes) -> None:
            raise RuntimeError("broken")

    async def run() -> tuple[list[Any], list[Any]]:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: errors.append(about["exception"].args))
        turn, recorded = TurnWrites(), [Broken(), Recorded()]
        for each in recorded:
            LingeringTransport(each, each, turn).write(b"answer")  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return errors, recorded[1].calls

    assert asyncio.run(run()) == ([("broken",)], [b"answer"])

"""Writes to a connection and closes it so that the client can still read its answer; sends answers to clients of
HTTP/1.0."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

LINGER_SECONDS = 5.0  # a client that still sends has this long to read a refusal
LINGER_BYTES = 64 * 2**20  # allowed to arrive meanwhile
MOST_COLLECTED = 32 * 2**10  # bytes that wait for the end of the event loop's turn


class Sender(Protocol):
    """Says whether a client may still be sending."""

    @property
    def unread(self) -> bool: ...


class TurnWrites:
    """Collects the writes of one turn of the event loop, and sends them at its end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._written: list[LingeringTransport] = []

    def add(self, transport: LingeringTransport) -> None:
        if not self._written:
            self._loop.call_soon(self._send_all)
        self._written.append(transport)

    def _send_all(self) -> None:
        written, self._written = self._written, []
        for transport in written:
            try:
                transport.send_collected()
            except Exception as error:  # it concerns only this connection
                self._loop.call_exception_handler({"message": "a connection was not written to", "exception": error})


class LingeringTransport:
    """Wraps a transport. The kernel resets a connection that is closed while data arrives, and a reset destroys the
    unread part of the answer. So `close` ends only our side, and discards arriving data until the client ends its side
    or LINGER_SECONDS have passed.

    All writes of one turn of the event loop are sent at once: headers with the first chunk, and all chunks that came
    while others were served. A system call takes as long as making a chunk.
    """

    __slots__ = ("_collected", "_discarded", "_lingering", "_sender", "_size", "_transport", "_turn", "paused")

    def __init__(self, transport: asyncio.Transport, sender: Sender, turn: TurnWrites) -> None:
        self.paused = False  # the client does not read the written bytes
        self._transport = transport
        self._sender = sender
        self._turn = turn
        self._discarded = 0
        self._lingering: asyncio.TimerHandle | None = None
        self._collected: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._collected:
            self._turn.add(self)
        self._collected.append(data)
        self._size += len(data)
        if self._size > MOST_COLLECTED:
            self.send_collected()

    def write_chunk(self, body: bytes) -> bool:
        """Writes a part of a chunked body; returns False if that has to wait, because the client does not read."""
        if self.paused:
            return False
        if body:  # an empty chunk would end the answer
            self.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def send_collected(self) -> None:
        collected, self._collected, self._size = self._collected, [], 0
        if collected and not self._transport.is_closing():  # the client may have left since they were written
            self._transport.write(collected[0] if len(collected) == 1 else b"".join(collected))

    def is_closing(self) -> bool:
        return self._lingering is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self.send_collected()
        if not (self._sender.unread and self._transport.can_write_eof()):
            return self._transport.close()
        self._transport.resume_reading()
        self._transport.write_eof()
        self._lingering = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)

    def abort(self) -> None:
        self._collected.clear()
        self._transport.abort()

    def discards(self, count: int) -> bool:
        """Returns whether the `count` bytes that were read are to be discarded."""
        if self._lingering is None:
            return False
        self._discarded += count
        if self._discarded > LINGER_BYTES:
            self._transport.abort()
        return True

    def ended(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()


class AnyLength(int):
    """Stands for the length of an answer that is known only at its end. uvicorn compares the sent bytes with the
    announced length; this one equals all."""

    def __lt__(self, _: int) -> bool:
        return False

    def __sub__(self, _: int) -> AnyLength:
        return self

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = int.__hash__

"""An answer on its way out: whole, or as server-sent events, and never longer than its reader stays."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import NamedTuple, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.server.chat.stream import Deltas, while_connected
from penstock.server.errors import LEFT, body_of
from penstock.text import Delta

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class ChunkTemplate:
    """A chunk that differs from the next one by its text alone: all but that is encoded once."""

    def __init__(self, make: Callable[[str], msgspec.Struct]) -> None:
        place = secrets.token_hex(16)
        self._before, _, self._after = encode(make(place)).partition(encode(place))

    def __call__(self, text: str) -> bytes:
        return self._before + encode(text) + self._after


class Framing(NamedTuple):
    """How a dialect puts chunks on the wire."""

    media_type: bytes
    frame: Callable[[bytes], bytes]
    end: bytes  # after the last chunk
    trouble: Callable[[PenstockError], bytes]  # the chunk that tells of an error in the middle


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


EVENT_STREAM = b"text/event-stream; charset=utf-8"
OPENAI = Framing(EVENT_STREAM, _event, _event(b"[DONE]"), body_of)


class AnswerWriter(Protocol):
    """An endpoint's way of putting deltas into words."""

    def chunks(self, choice: int, delta: Delta) -> Iterable[bytes]:
        """What to send at once for a delta, when streaming; encoded."""

    def last(self) -> Iterable[bytes]:
        """What to send after every choice has ended, when streaming."""

    def take(self, choice: int, delta: Delta) -> None:
        """Keeps a delta for the whole."""

    def whole(self) -> msgspec.Struct: ...


async def reply(
    http: HttpRequest, answer: AnswerWriter, deltas: Deltas, *, streaming: bool, framing: Framing = OPENAI
) -> Response:
    if streaming:
        return StreamResponse(_framed(answer, deltas, framing), framing)
    body = await while_connected(http.receive, _body(answer, deltas))
    return LEFT if body is None else Response(body, media_type="application/json")


async def _body(answer: AnswerWriter, deltas: Deltas) -> bytes:
    async with aclosing(deltas):
        async for choice, delta in deltas:
            answer.take(choice, delta)
    return encode(answer.whole())


async def _framed(answer: AnswerWriter, deltas: Deltas, framing: Framing) -> AsyncGenerator[bytes, None]:
    frame = framing.frame
    async with aclosing(deltas):
        async for choice, delta in deltas:
            for chunk in answer.chunks(choice, delta):
                yield frame(chunk)
    for chunk in answer.last():
        yield frame(chunk)
    if framing.end:
        yield framing.end


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class StreamResponse(Response):
    """Begins with the first chunk, so that what fails before it is an error like any other; what fails later is told
    in a chunk of its own."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], framing: Framing) -> None:
        self._chunks = chunks
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(send, scope["plain_send"]))

    async def _send(self, begin: Send, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = await anext(chunks)
            await begin({"type": "http.response.start", "status": 200, "headers": _headers(self._framing)})
            await send(_part(first))
            try:
                async for chunk in chunks:
                    await send(_part(chunk))
            except PenstockError as error:
                await send(_part(self._framing.frame(self._framing.trouble(error))))
        await send(_part(b"", more=False))


def _headers(framing: Framing) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", framing.media_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

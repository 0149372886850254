"""Sends an answer: whole, or as a stream of server-sent events or JSON lines, for as long as the client reads."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.server.chat.stream import Deltas, while_connected
from penstock.server.errors import CLIENT_LEFT, OPENAI_ERRORS
from penstock.server.request_context import STREAM, RequestContext
from penstock.text import Delta

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class ChunkTemplate:
    """Encodes chunks that differ by their text alone: everything else is encoded once."""

    def __init__(self, make: Callable[[str], msgspec.Struct]) -> None:
        placeholder = secrets.token_hex(16)
        self._before, _, self._after = encode(make(placeholder)).partition(encode(placeholder))

    def __call__(self, text: str) -> bytes:
        return self._before + encode(text) + self._after


class Framing(NamedTuple):
    """Says how a dialect puts chunks on the wire."""

    media_type: bytes
    frame: Callable[[bytes], bytes]
    end: bytes  # after the last chunk
    error: Callable[[PenstockError], bytes]  # the chunk that reports an error in the middle of a stream
    lost: Callable[[PenstockError], bytes] | None = None  # that which tells a reader why it gets no more, if it differs

    def for_reader(self) -> Framing:
        """Returns the framing for one of several readers: what keeps it from reading is no error of the answer."""
        return self if self.lost is None else self._replace(error=self.lost)


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


EVENT_STREAM = b"text/event-stream; charset=utf-8"
OPENAI = Framing(EVENT_STREAM, event, event(b"[DONE]"), OPENAI_ERRORS.encode)


class AnswerWriter(Protocol):
    """Turns deltas into a dialect's answer: into chunks as they arrive, or into one object at the end."""

    def chunks(self, choice: int, delta: Delta) -> Iterable[bytes]:
        """Returns the encoded chunks to send for a delta."""

    def final_chunks(self) -> Iterable[bytes]:
        """Returns the encoded chunks to send after every choice has ended."""

    def collect(self, choice: int, delta: Delta) -> None:
        """Keeps a delta for `result`."""

    def result(self) -> msgspec.Struct | list[Any]:
        """Returns the whole answer."""


async def reply(
    http: HttpRequest,
    context: RequestContext,
    writer: AnswerWriter,
    deltas: Deltas,
    *,
    streaming: bool,
    framing: Framing = OPENAI,
) -> Response:
    """Returns the answer. A stream whose client may come back is kept; any other ends when its client leaves."""
    context.streaming = streaming
    if streaming:
        chunks = _framed(writer, deltas, framing)
        if context.streams is not None:
            return context.streams.keep(context, chunks, framing)
        return StreamResponse(context, chunks, framing)
    body = await while_connected(http.receive, _body(writer, deltas))
    return CLIENT_LEFT if body is None else Response(body, media_type="application/json")


def json_response(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def _body(writer: AnswerWriter, deltas: Deltas) -> bytes:
    async with aclosing(deltas):
        async for choice, delta in deltas:
            writer.collect(choice, delta)
    return encode(writer.result())


async def _framed(writer: AnswerWriter, deltas: Deltas, framing: Framing) -> AsyncGenerator[bytes, None]:
    frame = framing.frame
    async with aclosing(deltas):
        async for choice, delta in deltas:
            for chunk in writer.chunks(choice, delta):
                yield frame(chunk)
    for chunk in writer.final_chunks():
        yield frame(chunk)
    if framing.end:
        yield framing.end


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class StreamResponse(Response):
    """Begins with the first chunk, so that an error before it has its own HTTP status. A later error is reported in a
    chunk. If the stream is kept, a header has the `id` under which it is."""

    def __init__(
        self, context: RequestContext, chunks: AsyncGenerator[bytes, None], framing: Framing, id: str = ""
    ) -> None:
        self._context = context
        self._chunks = chunks
        self._framing = framing
        self._id = id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(begin=send, send=self._context.send))

    async def _send(self, begin: Send, send: Send) -> None:
        """Sends the headers through the middlewares, and the chunks past them."""
        async with aclosing(self._chunks) as chunks:
            first = await anext(chunks, b"")
            await begin({"type": "http.response.start", "status": 200, "headers": self._all_headers()})
            await send(_part(first))
            try:
                async for chunk in chunks:
                    await send(_part(chunk))
            except PenstockError as error:
                self._context.outcome.fail(error)
                await send(_part(self._framing.frame(self._framing.error(error))))
        await send(_part(b"", more=False))

    def _all_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers of a stream. Proxies must not collect it."""
        plain = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        kept = [(STREAM, self._id.encode())] if self._id else []
        return [(b"content-type", self._framing.media_type), *plain, *kept]

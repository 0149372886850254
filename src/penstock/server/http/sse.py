"""Sends an answer: whole, or as a stream of server-sent events or JSON lines, for as long as the client reads."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.server.chat.schema_check import Deltas
from penstock.server.chat.stream import while_connected
from penstock.server.context.request_context import STREAM, RequestContext
from penstock.server.http.errors import CLIENT_LEFT, OPENAI_ERRORS
from penstock.text import Delta

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class ChunkTemplate:
    """Encodes chunks that differ only in their text: everything else is encoded once."""

    __slots__ = ("_after", "_before")

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
    lost: Callable[[PenstockError], bytes] | None = None  # the chunk for a reader that fell behind

    def for_reader(self) -> Framing:
        """Returns the framing for one of several readers, whose own errors are not the answer's."""
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

    def collect(self, choice: int, delta: Delta) -> None: ...

    def result(self) -> msgspec.Struct | list[Any]: ...


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
        chunks = partial(_write_chunks, writer, deltas, framing)
        if context.streams is not None:
            return context.streams.keep(context, collected(chunks), framing)
        return StreamResponse(context, chunks, framing)
    body = await while_connected(http.receive, _body(writer, deltas))
    return CLIENT_LEFT if body is None else Response(body, media_type="application/json")


def json_response(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def _body(writer: AnswerWriter, deltas: Deltas) -> bytes:
    await deltas(writer.collect)
    return encode(writer.result())


# -- chunks -------------------------------------------------------------------------------------------------------


class ChunkSink(Protocol):
    """Takes the framed chunks of a stream."""

    def put(self, chunk: bytes) -> None:
        """Takes a chunk, however slowly its reader reads."""

    async def send(self, chunk: bytes) -> None:
        """Takes a chunk, and returns when there is room for the next."""


Chunks = Callable[[ChunkSink], Coroutine[Any, Any, None]]  # writes a stream's chunks to a sink, and returns at its end


async def _write_chunks(writer: AnswerWriter, deltas: Deltas, framing: Framing, sink: ChunkSink) -> None:
    """Writes the chunks of an answer, each at the moment when its tokens arrive. An engine does not wait for a slow
    client: the unread part is bounded by the answer's length."""
    frame, put, chunks = framing.frame, sink.put, writer.chunks

    def take(choice: int, delta: Delta) -> None:
        for chunk in chunks(choice, delta):
            put(frame(chunk))

    await deltas(take)
    for chunk in writer.final_chunks():
        put(frame(chunk))
    if framing.end:
        put(framing.end)


def sent(chunks: AsyncGenerator[bytes, None]) -> Chunks:
    """Returns a writer of a generator's chunks, which waits until the client has read each one."""

    async def write(sink: ChunkSink) -> None:
        async with aclosing(chunks):
            async for chunk in chunks:
                await sink.send(chunk)

    return write


async def collected(chunks: Chunks) -> AsyncGenerator[bytes, None]:
    """Yields the chunks, for a reader that takes its time."""
    arrived = _Queue()
    writing = asyncio.create_task(chunks(arrived))
    writing.add_done_callback(lambda _: arrived.put_nowait(b""))
    try:
        while chunk := await arrived.get():
            yield chunk
        await writing
    finally:
        writing.cancel()
        await asyncio.wait({writing})


class _Queue(asyncio.Queue[bytes]):
    """Is a sink that keeps all chunks until they are read; an empty one is the end."""

    def put(self, chunk: bytes) -> None:  # type: ignore[override]
        self.put_nowait(chunk)

    async def send(self, chunk: bytes) -> None:
        self.put_nowait(chunk)


def _part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class HttpSink:
    """Sends chunks to a client, the first after the headers. Once those are sent, and while the client keeps up, a
    chunk is written to its connection at once. What the client does not read in time waits here."""

    __slots__ = ("_begin", "_flushing", "_open", "_send", "_start", "_waiting", "_write")

    def __init__(self, start: Message, begin: Send, context: RequestContext) -> None:
        self._start = start
        self._begin = begin
        self._send, self._write = context.send, context.write
        self._open = False  # the headers were sent
        self._waiting: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None  # while something waits

    @property
    def begun(self) -> bool:
        return self._open or self._flushing is not None

    def put(self, chunk: bytes) -> None:
        if self._flushing is None:
            if self._open and self._write is not None and self._write(chunk):
                return
            self._flushing = asyncio.create_task(self._flush())
        self._waiting.append(chunk)

    async def send(self, chunk: bytes) -> None:
        self.put(chunk)
        if self._flushing is not None:
            await self._flushing

    async def _flush(self) -> None:
        """Sends what waits, as fast as the client reads."""
        await self._begin_once()
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            for chunk in waiting:
                await self._send(_part(chunk))
        self._flushing = None

    async def _begin_once(self) -> None:
        if not self._open:
            await self._begin(self._start)
            self._open = True

    async def end(self) -> None:
        """Sends what waits, and the end of the answer."""
        if self._flushing is not None:
            await self._flushing
        await self._begin_once()
        await self._send(_part(b"", more=False))

    def leave(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()


class StreamResponse(Response):
    """Begins with the first chunk, so that an error before it has its own HTTP status. A later error is reported in a
    chunk. The headers go through the middlewares, and the chunks past them. If the stream is kept, a header has the
    `id` under which it is."""

    def __init__(self, context: RequestContext, chunks: Chunks, framing: Framing, id: str = "") -> None:
        self._context = context
        self._chunks = chunks
        self._framing = framing
        self._id = id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self._all_headers()}
        sink = HttpSink(start, send, self._context)
        try:
            await while_connected(receive, self._write(sink))
            if not sink.begun:
                await CLIENT_LEFT(scope, receive, send)
        finally:
            sink.leave()

    async def _write(self, sink: HttpSink) -> None:
        try:
            await self._chunks(sink)
        except PenstockError as error:
            if not sink.begun:
                raise
            self._context.notes.outcome.fail(error)
            sink.put(self._framing.frame(self._framing.error(error)))
        await sink.end()

    def _all_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers of a stream. Proxies must not collect it."""
        plain = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        kept = [(STREAM, self._id.encode())] if self._id else []
        return [(b"content-type", self._framing.media_type), *plain, *kept]

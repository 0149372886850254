"""Keeps the streams of requests that ask for it: such a stream continues when its client loses the connection, and the
client can resume reading.

Nobody can wait for ever, and nobody can fill the memory: a stream is ended after some seconds without a reader, its
events have a limit, and all streams together have one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.errors import Gone, NotFound, PenstockError
from penstock.server.context.request_context import RequestContext
from penstock.server.http.sse import EVENT_STREAM, Framing, StreamResponse, sent
from penstock.server.streams.buffer import ByteBudget, EventBuffer

RESUME_SECONDS = 60.0  # a stream without a reader is kept this long
STREAM_BYTES = 4 * 2**20  # events of one stream
TOTAL_BYTES = 64 * 2**20
MOST_STREAMS = 4096  # kept at once, beyond those that still run
EVENT_END = b"\n\n"
REMEMBERED = 4096  # streams of which is known that they are gone
EXPIRED, EVICTED, DELETED, UNSENT = "expired", "evicted", "deleted", "unsent"  # why a stream is gone
REASONS = {
    EXPIRED: "nobody read it for {seconds:g} s",
    EVICTED: "the memory was needed for other streams",
    DELETED: "it was deleted",
    UNSENT: "its client left before the first event",
}

log = logging.getLogger(__name__)


class KeepLimits(NamedTuple):
    """Limits the kept streams."""

    seconds: float = RESUME_SECONDS  # without a reader; 0: nothing is kept
    stream: int = STREAM_BYTES
    total: int = TOTAL_BYTES


class KeptStream:
    """Reads an answer into a buffer for any number of readers. Its events are numbered: server-sent events have an `id`
    of the stream's id and their number, lines of other dialects are counted."""

    def __init__(self, id: str, tenant: str | None, framing: Framing, buffer: EventBuffer) -> None:
        self.id = id
        self.tenant = tenant  # the API key that it belongs to; None: without keys
        self.framing = framing
        self.buffer = buffer
        self.error: Exception | None = None  # the error that ended it
        self.gone = ""  # why it was ended early
        self.begun = False  # something of it was sent
        self.task: asyncio.Task[None] | None = None
        self.left_at = 0.0  # when the last reader left, by the loop's clock
        self.timer: asyncio.TimerHandle | None = None  # runs while it lacks a reader

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yields its events after the one with this number. Raises what went wrong before there was any."""
        try:
            async with aclosing(self.buffer.follow(after)) as events:
                async for event in events:
                    yield event
        except Gone as missed:
            raise (gone(self.id, self.gone) if self.gone else missed) from None
        if self.gone:
            raise gone(self.id, self.gone)
        if self.error is not None and not self.buffer.count:
            raise self.error

    def events(self, chunk: bytes) -> list[bytes]:
        """Returns the events of a chunk, with their ids where the dialect has such."""
        if self.framing.media_type != EVENT_STREAM:
            return [chunk]
        events = chunk.removesuffix(EVENT_END).split(EVENT_END)
        return [numbered(self.id, self.buffer.count + at, event + EVENT_END) for at, event in enumerate(events)]


def numbered(stream: str, number: int, event: bytes) -> bytes:
    """Returns a server-sent event with its id, which clients send back as the last one they have."""
    return f"id: {stream}:{number}\n".encode() + event


def gone(id: str, reason: str) -> Gone:
    return Gone(f"the stream {id!r} is no longer kept, because {reason}: send the request again")


class KeptStreams:
    """Holds the streams that are kept, by id, and reports them to Prometheus."""

    def __init__(self, limits: KeepLimits | None = None) -> None:
        self.limits = limits or KeepLimits()
        self._budget = ByteBudget(self.limits.total)
        self._streams: dict[str, KeptStream] = {}
        self._gone: OrderedDict[str, tuple[str | None, str]] = OrderedDict()  # tenant and reason, the oldest first
        self._counts: Counter[str] = Counter()

    def keep(self, context: RequestContext, chunks: AsyncGenerator[bytes, None], framing: Framing) -> StreamResponse:
        """Returns an answer's stream to its client, and keeps it."""
        self._make_room(streams=1)
        id = context.stream_id or f"stream_{secrets.token_hex(16)}"
        buffer = EventBuffer(self.limits.stream, self._budget)
        stream = self._streams[id] = KeptStream(id, context.caller.owner_name, framing, buffer)
        task = stream.task = asyncio.create_task(self._run(stream, chunks))
        self._leave(stream)
        self._counts["kept"] += 1
        if (payer := context.caller.payer) is not None:
            context.on_end(lambda: payer.count_until_done(task))
        return self._response(context, stream, -1)

    def find(self, id: str, tenant: str | None) -> KeptStream | None:
        stream = self._streams.get(id)
        return stream if stream is not None and stream.tenant == tenant else None

    def get(self, id: str, tenant: str | None) -> KeptStream:
        """Returns a tenant's stream; raises Gone if it is kept no more, and NotFound if it never was, or is
        another's."""
        if (stream := self.find(id, tenant)) is not None:
            return stream
        if id in self._gone and self._gone[id][0] == tenant:
            raise gone(id, self._gone[id][1])
        raise NotFound(f"there is no stream {id[:100]!r} here: it was not kept, or is another owner's")

    def resume(self, context: RequestContext, stream: KeptStream, after: int) -> StreamResponse:
        """Returns a stream's events after the one with this number; raises Gone if they were dropped."""
        stream.buffer.check(after)
        self._counts["resumed"] += 1
        return self._response(context, stream, after)

    async def delete(self, stream: KeptStream) -> None:
        """Ends a stream and forgets its events. Its readers get an error."""
        self._drop(stream, DELETED)
        assert stream.task is not None
        await asyncio.wait({stream.task})

    async def close(self) -> None:
        for stream in list(self._streams.values()):
            await self.delete(stream)

    def collect(self) -> Iterator[Metric]:
        live = GaugeMetricFamily(
            "penstock_kept_streams", "Kept streams, by whether a client reads them", labels=["read"]
        )
        read = sum(stream.buffer.readers > 0 for stream in self._streams.values())
        live.add_metric(["true"], read)
        live.add_metric(["false"], len(self._streams) - read)
        yield live
        yield GaugeMetricFamily("penstock_kept_stream_bytes", "Bytes of all kept streams' events", self._budget.used)
        events = CounterMetricFamily("penstock_kept_stream_events", "Events of kept streams, by kind", labels=["event"])
        for event in ("kept", "resumed", *REASONS):
            events.add_metric([event], self._counts[event])
        yield events

    def _response(self, context: RequestContext, stream: KeptStream, after: int) -> StreamResponse:
        return StreamResponse(context, sent(self._read(stream, after)), stream.framing.for_reader(), stream.id)

    async def _read(self, stream: KeptStream, after: int) -> AsyncGenerator[bytes, None]:
        """Yields a stream's events. While it has a reader, it is not ended."""
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None
        try:
            async with aclosing(stream.follow(after)) as events:
                async for event in events:
                    stream.begun = True
                    yield event
        finally:
            if not stream.begun:
                self._drop(stream, UNSENT)  # nobody knows its id
            elif not stream.buffer.readers:
                self._leave(stream)

    async def _run(self, stream: KeptStream, chunks: AsyncGenerator[bytes, None]) -> None:
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    await self._add(stream, chunk)
        except PenstockError as error:
            stream.error = error
        except Exception as error:
            stream.error = error
            if stream.buffer.count:
                log.exception("a kept stream failed")
        try:
            await self._add_error(stream)
        finally:
            stream.buffer.end()

    async def _add_error(self, stream: KeptStream) -> None:
        """Adds the event that reports why a stream failed. If nothing was sent, the HTTP status does so."""
        error, framing = stream.error, stream.framing
        if error is None or not stream.buffer.count:
            return
        if not isinstance(error, PenstockError):
            error = PenstockError("the server failed while it generated this answer; its log has the details")
        await self._add(stream, framing.frame(framing.error(error)))

    async def _add(self, stream: KeptStream, chunk: bytes) -> None:
        for event in stream.events(chunk):
            self._make_room(size=len(event))
            await stream.buffer.add(event)

    def _make_room(self, *, streams: int = 0, size: int = 0) -> None:
        """Ends streams that nobody reads until there is room for more."""
        while self._budget.used + size > self._budget.most or len(self._streams) + streams > MOST_STREAMS:
            if (victim := self._victim()) is None:
                return
            self._drop(victim, EVICTED)

    def _victim(self) -> KeptStream | None:
        """Returns which stream to end for others: of those without a reader one of the tenant with the most bytes, and
        of its own one that has ended, or else the one whose reader left first."""
        held: Counter[str | None] = Counter()
        for stream in self._streams.values():
            held[stream.tenant] += stream.buffer.bytes
        unread = (stream for stream in self._streams.values() if not stream.buffer.readers)
        return min(unread, key=lambda each: (-held[each.tenant], not each.buffer.ended, each.left_at), default=None)

    def _leave(self, stream: KeptStream) -> None:
        """Records that the last reader has left; ends the stream unless one returns in time."""
        if self._streams.get(stream.id) is not stream:
            return
        loop = asyncio.get_running_loop()
        stream.left_at = loop.time()
        stream.timer = loop.call_later(self.limits.seconds, self._drop, stream, EXPIRED)

    def _drop(self, stream: KeptStream, reason: str) -> None:
        if self._streams.pop(stream.id, None) is None:
            return
        if stream.timer is not None:
            stream.timer.cancel()
        assert stream.task is not None
        stream.task.cancel()
        stream.gone = REASONS[reason].format(seconds=self.limits.seconds)
        stream.buffer.clear()
        stream.buffer.end()
        self._counts[reason] += 1
        self._gone[stream.id] = stream.tenant, stream.gone
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

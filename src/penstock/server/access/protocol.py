"""Limits what uvicorn's HTTP leaves open: how many connections there are, how long a request's head may be and may
take, and how long a client may not read. None of it is paid while an answer streams."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from httptools import HttpParserCallbackError, HttpParserInvalidURLError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.errors import InvalidRequest, Overloaded, PenstockError
from penstock.server.access.lingering import AnyLength, LingeringTransport, TurnWrites
from penstock.server.context.middleware import WRITE
from penstock.server.http.errors import OPENAI_ERRORS
from penstock.server.telemetry.http_responses import refused_connections

MAX_HEAD = 64 * 2**10  # bytes of the request line and the headers
MAX_HEADERS = 256
MAX_HEADS = 16 * 2**20  # bytes of all heads that are not whole
MAX_READ = 256 * 2**10  # bytes of one read
HEAD_READ = 2**10  # bytes of a read that may begin with a head: so few requests come with one read
MAX_PIPELINED = 128  # requests that wait for their turn on a connection: more than come with one such read
MAX_ALL_PIPELINED = 4096  # the same on all connections: about 12 MiB
IDLE_SECONDS = 20.0  # without a request: longer than clients keep a connection (httpx: 5), so that they close it first
HEAD_SECONDS = 20.0  # from a request's first byte to the end of its headers
STALLED_SECONDS = 30.0  # allowed without the client reading
PROBE_SECONDS = 0.25  # between looks whether a client that has sent all it will is still there
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

max_connections = 2**20  # `penstock serve` derives it from the limit on open files


@dataclass
class SharedState:
    """Holds state that the connections of one server share."""

    turn: TurnWrites = field(default_factory=TurnWrites)
    idle: dict[BoundedProtocol, None] = field(default_factory=dict)  # without a request, the longest idle first
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(MAX_READ)))
    pipelined: int = 0  # requests that wait for their turn on their connection
    heads: dict[BoundedProtocol, int] = field(default_factory=dict)  # bytes of those not whole, the oldest first
    head_bytes: int = 0  # total

    def make_room(self, newest: BoundedProtocol) -> bool:
        """Closes the connection that has been idle for the longest time; returns False if `newest` is the only one."""
        oldest = next(iter(self.idle))
        if oldest is newest:
            return False
        del self.idle[oldest]
        oldest.transport.abort()
        return True

    def forget(self, pipeline: deque[Any]) -> None:
        self.pipelined -= len(pipeline)
        pipeline.clear()


_common: WeakKeyDictionary[ServerState, SharedState] = WeakKeyDictionary()


def limit_connections(most: int) -> None:
    global max_connections
    max_connections = most


class TooManyHeaders(Exception):
    """Ends the parsing of a request."""


class TooManyPipelined(Exception):
    """Ends the parsing of a client's bytes."""


class PipelineFlow(FlowControl):
    """Reads nothing while requests wait for their turn on the connection."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class ClientProbe:
    """Writes interim responses to a client that may have left, until its answer begins."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._timer = protocol.loop.call_later(PROBE_SECONDS, self._probe)

    def stop(self) -> None:
        self._timer.cancel()

    def _probe(self) -> None:
        protocol = self._protocol
        if protocol.cycle.response_started or protocol.transport.is_closing():
            return
        active = protocol.active
        if active is None or active.response_complete or not active.response_started:
            protocol.transport.write(CONTINUE)  # else it would be within the answer to an earlier request
        self._timer = protocol.loop.call_later(PROBE_SECONDS, self._probe)


class BoundedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    flow: PipelineFlow
    _timer: asyncio.TimerHandle | None = None  # runs while the head is incomplete
    _stall: asyncio.TimerHandle | None = None
    _probe: ClientProbe | None = None  # runs once a client has closed its side
    _head: int | None = None  # bytes so far of a head, or between and after chunks; None: in neither
    _awaited: float = 0  # bytes of the body that are still to come; infinite: it comes in chunks
    _sent = False  # the client has sent something
    _unparsed: bytes = b""  # the latest read
    _upgrading = False  # the latest head asks for another protocol
    _behind = False  # the latest read began with the end of another request, which does not count
    _dropped = False  # requests that waited for their turn are not answered
    active: RequestResponseCycle | None = None  # the request that is answered; `cycle` is the latest that was read
    transport: LingeringTransport  # type: ignore[assignment]

    @property
    def unread(self) -> bool:
        """Returns whether the client may still be sending something that nobody will read."""
        return self._sent and (self.cycle is None or self.cycle.more_body or self._dropped)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._common = _common.get(self.server_state) or _common.setdefault(self.server_state, SharedState())
        super().connection_made(LingeringTransport(transport, self, self._common.turn))  # type: ignore[arg-type]
        self.flow = PipelineFlow(self.transport)  # type: ignore[arg-type]
        self._timer = self.loop.call_later(IDLE_SECONDS, self._on_timeout)
        self._common.idle[self] = None
        if len(self.connections) > max_connections and not self._common.make_room(self):
            self._refuse(
                503, Overloaded(f"Server is busy: {max_connections} connections (the limit). Retry after 1 s.")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._reset()
        if self._probe is not None:
            self._probe.stop()
        self._common.idle.pop(self, None)
        self._common.forget(self.pipeline)
        self.transport.ended()
        self.resume_writing()
        if self.active is not None and not self.active.response_complete:  # uvicorn informs only the latest request
            self.active.disconnected = True
            self.active.message_event.set()
        super().connection_lost(exc)

    def get_buffer(self, _: int) -> memoryview:
        """Returns room for the rest of the body. Where a head may follow, the room is small, and so is the number of
        requests that come with one read."""
        room = MAX_READ if self.transport.is_closing() else min(max(self._awaited, HEAD_READ), MAX_READ)
        return self._common.buffer[: int(room)]

    def buffer_updated(self, count: int) -> None:
        self.data_received(self._common.buffer[:count])  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        if self.transport.discards(len(data)):
            return
        self._sent, self._behind = True, False
        self._unparsed = data
        super().data_received(data)
        if self._head is not None and not self._behind:
            self._count_head(len(data))

    def _count_head(self, size: int) -> None:
        """Counts bytes of a head that is not whole. Where all such heads are too many bytes, the oldest is refused: a
        head takes milliseconds unless its client is slow on purpose."""
        assert self._head is not None
        self._head += size
        if self._head > MAX_HEAD:
            message = f"the headers have more than {MAX_HEAD} bytes (the limit): send fewer"
            return self._refuse(431, _invalid(431, message))
        common = self._common
        common.heads[self] = common.heads.get(self, 0) + size
        common.head_bytes += size
        while common.head_bytes > MAX_HEADS:
            message = f"others arrive, and heads that are not whole may have {MAX_HEADS} bytes together: send it faster"
            next(iter(common.heads))._refuse(408, _invalid(408, message))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps the connection if the client has sent a whole request: it may have closed only its side. One that has
        left resets the connection when something is sent to it, so an answer that has not begun is preceded by
        interim responses (HTTP/1.1 100), which clients skip."""
        self.transport.send_collected()  # the connection may be closed before the turn ends
        cycle = self.cycle
        if self.transport.is_closing() or cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        if cycle.scope["http_version"] != "1.0":
            self._probe = ClientProbe(self)
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.active = cycle
        if cycle.scope["http_version"] == "1.0":  # knows no chunks: the answer ends with the connection
            cycle.chunked_encoding = False
            cycle.expected_content_length = AnyLength()
        elif cycle.scope["method"] != "HEAD":
            cycle.scope["extensions"] = {WRITE: {"call": self.transport.write_chunk}}
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reset()
        self._head = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._on_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            raise TooManyHeaders  # the parser ends: 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._upgrading = True
            return
        self._reset()
        self._common.idle.pop(self, None)
        headers, waiting = dict(self.headers), len(self.pipeline)
        self._awaited = inf if b"transfer-encoding" in headers else int(headers.get(b"content-length", 0))
        super().on_headers_complete()
        if len(self.pipeline) > waiting:
            self.flow.held = True
            self._common.pipelined += 1
            if len(self.pipeline) > MAX_PIPELINED or self._common.pipelined > MAX_ALL_PIPELINED:
                raise TooManyPipelined

    def on_chunk_header(self) -> None:
        self._head = -MAX_READ  # after the last chunk there may be headers; the read may be all body

    def on_body(self, body: bytes) -> None:
        self._head = None
        self._awaited -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:  # its body is not read yet
            return
        self._reset()
        self._awaited, self._behind = 0, True
        super().on_message_complete()
        if self.cycle.response_complete:
            self._await_request()

    def on_response_complete(self) -> None:
        waiting = len(self.pipeline)
        super().on_response_complete()
        self._common.pipelined -= waiting - len(self.pipeline)
        if self.flow.held and not self.pipeline and not self._dropped:
            self.flow.held = False
            self.flow.resume_reading()
        if waiting:
            return  # the next request has come already, and is answered now
        self._common.idle[self] = None
        if self.cycle.more_body:  # nobody reads the rest of the body
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        else:
            self._await_request()

    def _await_request(self) -> None:
        """Begins the time that the next request may take to begin, unless it has begun. uvicorn's own timer ends with
        any byte, such as an empty line before a request."""
        if self._timer is None:
            self._timer = self.loop.call_later(IDLE_SECONDS, self._on_timeout)

    def _unsupported_upgrade_warning(self) -> None:
        """Reads a request again without its wish for another protocol, which a server may ignore: clients such as
        Java's send one with every first request, and its body is not parsed with it."""
        ended, method, version = sys.exception(), self.parser.get_method(), self.parser.get_http_version()
        self._upgrading = False
        if method == b"CONNECT" or not isinstance(ended, HttpParserUpgrade):
            return self._refuse(405, _invalid(405, "this server is no proxy: send the request to its own paths"))
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in (b"connection", b"upgrade")]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            lines.append(b"connection: close")
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        rest = bytes(self._unparsed[ended.args[0] :])
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.paused = True
        self._stall = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self.transport.paused = False
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        fault = error.__context__ if isinstance(error, HttpParserCallbackError) else None
        if isinstance(fault, TooManyPipelined):
            return self._refuse(503, Overloaded("Server is busy: too many requests wait on connections"))
        if fault is not None and not isinstance(fault, TooManyHeaders | HttpParserInvalidURLError):
            self.logger.error("a request could not be read because of a fault in this server", exc_info=fault)
        self._refuse(400, _invalid(400, f"{msg.removesuffix('.')}: it is not HTTP/1.1"))

    def _end_after(self, cycle: RequestResponseCycle) -> None:
        """Closes the connection when this request is answered. What the client has sent behind it is not answered, so
        that the client sends it again on another connection."""
        self._common.forget(self.pipeline)
        self._dropped, cycle.keep_alive, self.cycle = True, False, cycle
        self.flow.held = True
        self.flow.pause_reading()

    def _reset(self) -> None:
        self._head = None
        self._common.head_bytes -= self._common.heads.pop(self, 0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self.flow.held:  # the rest of the head is not read yet
            self._timer = self.loop.call_later(HEAD_SECONDS, self._on_timeout)
        elif self._head is None:
            self.transport.close()  # the client has sent nothing
        else:
            message = f"the headers took more than {HEAD_SECONDS:g} seconds (the limit): send them faster"
            self._refuse(408, _invalid(408, message))

    def _refuse(self, status: int, error: PenstockError) -> None:
        self._reset()
        if self.transport.is_closing():
            return
        refused_connections[status, error.code] += 1
        active = self.active
        if active is not None and not active.response_complete:
            if not active.more_body:
                return self._end_after(active)
            if active.response_started:
                return self.transport.abort()
            active.disconnected = True  # it is this request's body that is wrong
            active.message_event.set()
        body = OPENAI_ERRORS.encode(error)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
        self.parser = None  # type: ignore[assignment]  # which holds what came of a head; what still comes is not parsed


def _invalid(status: int, message: str) -> InvalidRequest:
    return InvalidRequest(message, code=HTTPStatus(status).phrase.lower().replace(" ", "_"))

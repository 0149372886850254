"""Limits what uvicorn's HTTP leaves open: how many connections there are, how long a request's head may be and may
take, and how long a client may not read. None of it is paid while an answer streams."""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

from httptools import HttpParserCallbackError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.errors import InvalidRequest, Overloaded, PenstockError
from penstock.server.access.lingering import AnyLength, LingeringTransport, TurnWrites
from penstock.server.errors import OPENAI_ERRORS
from penstock.server.request_context import WRITE
from penstock.server.telemetry.http_responses import refused_connections

MAX_HEAD = 64 * 2**10  # bytes of the request line and the headers
MAX_HEADERS = 256
MAX_READ = 256 * 2**10  # bytes of one read
IDLE_SECONDS = 20.0  # without a request: longer than clients keep a connection (httpx: 5), so that they close it first
HEAD_SECONDS = 20.0  # from a request's first byte to the end of its headers
STALLED_SECONDS = 30.0  # that a client may leave unread what is sent
PROBE_SECONDS = 0.25  # between looks whether a client that has sent all it will is still there
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

max_connections = 2**20  # of one server; `penstock serve` sets it to what the limit on open files allows
_idle: WeakKeyDictionary[ServerState, dict[BoundedProtocol, None]] = WeakKeyDictionary()  # the longest idle first
_turns: WeakKeyDictionary[ServerState, TurnWrites] = WeakKeyDictionary()


def limit_connections(most: int) -> None:
    """Sets how many connections a server may have."""
    global max_connections
    max_connections = most


class TooManyHeaders(Exception):
    """Ends the parsing of a request."""


class BoundedProtocol(HttpToolsProtocol):
    _timer: asyncio.TimerHandle | None = None  # runs while the head is incomplete
    _stall: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None  # runs while a client that has sent all it will waits for its answer
    _head: int | None = None  # bytes so far of a head, or between and after chunks; None: in neither
    _sent = False  # the client has sent something
    _shared = False  # the latest read began with another request's end, which is no part of the head
    _active: RequestResponseCycle | None = None  # the request that is answered; `cycle` is the latest that was read
    transport: LingeringTransport  # type: ignore[assignment]

    @property
    def unread(self) -> bool:
        """Returns whether the client may still be sending something that nobody will read."""
        return self._sent and (self.cycle is None or self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        turn = _turns.get(self.server_state) or _turns.setdefault(self.server_state, TurnWrites())
        super().connection_made(LingeringTransport(transport, self, turn))  # type: ignore[arg-type]
        self._timer = self.loop.call_later(IDLE_SECONDS, self._on_timeout)
        self._idlers[self] = None
        if len(self.connections) > max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reset()
        self._stop_probing()
        self._idlers.pop(self, None)
        self.transport.ended()
        self.resume_writing()
        if self._active is not None and not self._active.response_complete:  # uvicorn tells the latest request only
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.discards(len(data)):
            return
        self._sent, self._shared = True, False
        super().data_received(data)
        if self._head is not None and not self._shared:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(431, _invalid(431, f"the headers have more than {MAX_HEAD} bytes (the limit): send fewer"))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps the connection if the client has sent a whole request: it may have closed only its side. One that has
        left resets the connection when something is sent to it, so an answer that has not begun is preceded by
        interim responses (HTTP/1.1 100), which clients skip."""
        cycle = self.cycle
        if self.transport.is_closing() or cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        if cycle.scope["http_version"] != "1.0":
            self._probe = self.loop.call_later(PROBE_SECONDS, self._probe_client)
        return True

    def _probe_client(self) -> None:
        if self.cycle.response_started or self.transport.is_closing():
            return
        if self._active is None or self._active.response_complete or not self._active.response_started:
            self.transport.write(CONTINUE)  # else it would be within the answer to an earlier request
        self._probe = self.loop.call_later(PROBE_SECONDS, self._probe_client)

    def _stop_probing(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
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
        self._reset()
        self._idlers.pop(self, None)
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._head = -MAX_READ  # after the last chunk there may be headers; what was read with it may be all body

    def on_body(self, body: bytes) -> None:
        self._head = None
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reset()
        self._shared = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        followed = bool(self.pipeline)
        super().on_response_complete()
        if followed:
            return  # the next request has come already, and is answered now
        self._idlers[self] = None
        if self.cycle.more_body:  # nobody reads the rest of the body
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

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
        if fault is not None and not isinstance(fault, TooManyHeaders):
            self.logger.error("a request could not be read because of a fault in this server", exc_info=fault)
        self._refuse(400, _invalid(400, f"{msg.removesuffix('.')}: it is not HTTP/1.1"))

    @property
    def _idlers(self) -> dict[BoundedProtocol, None]:
        """Returns the server's connections without a request."""
        return _idle.setdefault(self.server_state, {})

    def _make_room(self) -> None:
        """Closes the connection that has been without a request for the longest time; without one, refuses this."""
        oldest = next(iter(self._idlers))
        if oldest is not self:
            del self._idlers[oldest]
            return oldest.transport.abort()
        self._refuse(503, Overloaded(f"Server is busy: {max_connections} connections (the limit). Retry after 1 s."))

    def _reset(self) -> None:
        self._head = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self._head is None:
            self.transport.close()  # the client has sent nothing
        else:
            message = f"the headers took more than {HEAD_SECONDS:g} seconds (the limit): send them faster"
            self._refuse(408, _invalid(408, message))

    def _refuse(self, status: int, error: PenstockError) -> None:
        self._reset()
        if self.transport.is_closing():
            return
        refused_connections[status, error.code] += 1
        if self.cycle is not None and not self.cycle.response_complete:
            return self.transport.abort()  # another answer is being sent
        body = OPENAI_ERRORS.encode(error)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


def _invalid(status: int, message: str) -> InvalidRequest:
    return InvalidRequest(message, code=HTTPStatus(status).phrase.lower().replace(" ", "_"))

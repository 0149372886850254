"""Limits what uvicorn's HTTP leaves open: how long a request's head may be and may take, and how long a client may not
read. None of it is paid while an answer streams."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.errors import InvalidRequest
from penstock.server.errors import OPENAI_ERRORS

MAX_HEAD = 64 * 2**10  # bytes of the request line and the headers
MAX_HEADERS = 256
MAX_READ = 256 * 2**10  # bytes of one read
IDLE_SECONDS = 20.0  # without a request: longer than clients keep a connection (httpx: 5), so that they close it first
HEAD_SECONDS = 20.0  # from a request's first byte to the end of its headers
STALLED_SECONDS = 60.0  # that a client may leave unread what is sent


class BoundedProtocol(HttpToolsProtocol):
    _timer: asyncio.TimerHandle | None = None  # runs while the head is incomplete
    _stall: asyncio.TimerHandle | None = None
    _head: int | None = None  # bytes so far of a head, or between and after chunks; None: in neither
    _shared = False  # the latest read began with another request's end, which is no part of the head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(IDLE_SECONDS, self._on_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reset()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._shared = False
        super().data_received(data)
        if self._head is not None and not self._shared:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(431, f"the headers have more than {MAX_HEAD} bytes (the limit): send fewer")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reset()
        self._head = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._on_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")  # the parser ends: 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reset()
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
        super().on_response_complete()
        if self.cycle.more_body:  # nobody reads the rest of the body
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _reset(self) -> None:
        self._head = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        if self._head is None:
            self.transport.close()  # the client has sent nothing
        else:
            self._refuse(408, f"the headers took more than {HEAD_SECONDS:g} seconds (the limit): send them faster")

    def _refuse(self, status: int, message: str) -> None:
        self._reset()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            return self.transport.abort()  # another answer is being sent
        phrase = HTTPStatus(status).phrase
        body = OPENAI_ERRORS.encode(InvalidRequest(message, code=phrase.lower().replace(" ", "_")))
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

"""What the server asks of itself: a request through the application like any client's, answered after all of theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from starlette.types import ASGIApp, Message

from penstock.ipc.client import EngineClient
from penstock.server.served_model import ServedModel
from penstock.types import Event, Hello, Request, Stats

BEHIND = 2**31  # the priority of what may wait: behind all that clients may ask for
GIVE_WAY = 0.02  # seconds until the next look whether clients are served

log = logging.getLogger(__name__)


class Behind:
    """An engine for work that may wait: at most so many rows at once, each admitted after, and giving up its memory
    before, every client's. While clients are served, those that end are not followed by others until few are left."""

    def __init__(self, client: EngineClient, rows: int) -> None:
        self._client = client
        self._rows = asyncio.Semaphore(rows)
        self._few = max(1, rows // 4)
        self._running = 0

    @property
    def hello(self) -> Hello | None:
        return self._client.hello

    @property
    def trouble(self) -> str:
        return self._client.trouble

    @property
    def restarts(self) -> int:
        return self._client.restarts

    @property
    def stats(self) -> Stats:
        return self._client.stats

    async def start(self) -> Hello:
        return await self._client.start()

    async def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        async with self._rows:
            while self._running >= self._few and self._clients_are_served():
                await asyncio.sleep(GIVE_WAY)
            self._running += 1
            try:
                async with aclosing(self._client.submit(request._replace(priority=BEHIND))) as steps:
                    async for events in steps:
                        yield events
            finally:
                self._running -= 1

    def _clients_are_served(self) -> bool:
        return self.hello is not None and self.stats.running + self.stats.waiting > self._running

    def abort(self, id: int) -> None:
        self._client.abort(id)

    def next_id(self) -> int:
        return self._client.next_id()

    async def close(self) -> None:
        await self._client.close()


class AppAnswer(NamedTuple):
    status: int
    request_id: str
    body: bytes


async def ask(app: ASGIApp, served: ServedModel, path: str, body: bytes) -> AppAnswer:
    """What `app` answers to a POST of this body, with `served` in the place of its own."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {},
        "served": served,
    }
    to_read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not to_read:
            await asyncio.Future()  # this client does not leave
        return to_read.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await app(scope, receive, send)
    except Exception:
        if not sent:
            raise
        log.exception("a request of the server's own failed")  # and was answered so
    begun, *parts = sent
    request_id = dict(begun["headers"])[b"x-request-id"].decode()
    return AppAnswer(begun["status"], request_id, b"".join(part.get("body", b"") for part in parts))

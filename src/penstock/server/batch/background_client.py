"""An engine client for background requests, which wait behind those of all other clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from penstock.ipc.client import EngineClient
from penstock.types import Event, Hello, Request, Stats

BEHIND = 2**31  # the priority of what may wait: behind all that clients may ask for
GIVE_WAY = 0.02  # seconds until the next look whether clients are served


class BackgroundClient:
    """An engine for work that may wait: at most so many rows at once, each admitted after, and giving up its memory
    before, every client's. While clients are served, those that end are not followed by others until few are left."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._running = 0

    def limit(self, rows: int) -> None:
        self._rows = asyncio.Semaphore(rows)
        self._few = max(1, rows // 4)

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

"""Holds the parts of a server that endpoints share: files, batches, streams, and endpoints with state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from penstock.server.batch.archive import Archive
    from penstock.server.batch.run import BatchRunner
    from penstock.server.streams.kept import KeptStreams
    from penstock.server.telemetry.recent_requests import RecentRequests


class Endpoints:
    """Is the base of endpoints that share state. A server makes one instance, before the first call."""

    def __init__(self, services: Services) -> None: ...

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Saves the state, while the archive is still open."""


E = TypeVar("E", bound=Endpoints)


class Services:
    """Offers a server's parts to its endpoints."""

    def __init__(
        self,
        archive: Archive,
        batches: BatchRunner,
        streams: KeptStreams,
        recent: RecentRequests,
        *,
        keeps_answers: bool = False,
    ) -> None:
        self.archive = archive
        self.batches = batches
        self.streams = streams
        self.recent = recent
        self.keeps_answers = keeps_answers  # on disk, in the archive
        self._opened: dict[type[Endpoints], asyncio.Task[Endpoints]] = {}

    async def get(self, kind: type[E]) -> E:
        """Returns the server's instance of these endpoints."""
        if kind not in self._opened:
            self._opened[kind] = asyncio.create_task(self._open(kind))
        found = await asyncio.shield(self._opened[kind])
        assert isinstance(found, kind)
        return found

    async def _open(self, kind: type[Endpoints]) -> Endpoints:
        endpoints = kind(self)
        try:
            await endpoints.open()
        except BaseException:
            del self._opened[kind]  # the next request tries again
            raise
        return endpoints

    async def close(self) -> None:
        for opening in list(self._opened.values()):
            await (await opening).close()

"""Pulls models for clients: one pull per model, shared by all clients that ask, and few models at once.

A pull continues when its clients have left: the next one finds it done.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import NamedTuple

from penstock import store
from penstock.errors import Overloaded

MAX_PULLS = 4
MAX_UNREAD = 256  # steps of progress that are kept for a slow reader


class PullProgress(NamedTuple):
    what: str
    done: int
    total: int | None


class PullReader:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._unread: deque[PullProgress | Exception | None] = deque(maxlen=MAX_UNREAD)
        self._more = asyncio.Event()

    def put(self, what: PullProgress | Exception | None) -> None:
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._take, what)

    def _take(self, what: PullProgress | Exception | None) -> None:
        self._unread.append(what)
        self._more.set()

    async def next(self) -> PullProgress | Exception | None:
        while not self._unread:
            self._more.clear()
            await self._more.wait()
        return self._unread.popleft()


class Pulls:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[str, list[PullReader]] = {}  # model -> readers of its pull

    def join(self, ref: str, reader: PullReader) -> None:
        with self._lock:
            if ref in self._readers:
                return self._readers[ref].append(reader)
            if len(self._readers) >= MAX_PULLS:
                names = ", ".join(self._readers)
                raise Overloaded(
                    f"Server is busy: it is pulling {names} (the limit is {MAX_PULLS} at once). Retry when one is done"
                )
            self._readers[ref] = [reader]
        threading.Thread(target=self._fetch, args=(ref,), name="penstock-pull", daemon=True).start()

    def leave(self, ref: str, reader: PullReader) -> None:
        with self._lock, suppress(KeyError, ValueError):
            self._readers[ref].remove(reader)

    def _fetch(self, ref: str) -> None:
        error = None
        try:
            store.fetch(ref, progress=lambda *step: self._publish(ref, PullProgress(*step)))
        except Exception as raised:
            error = raised
        self._publish(ref, error, last=True)

    def _publish(self, ref: str, what: PullProgress | Exception | None, last: bool = False) -> None:
        with self._lock:
            for reader in self._readers.pop(ref) if last else self._readers[ref]:
                reader.put(what)


PULLS = Pulls()


async def pulling(ref: str) -> AsyncGenerator[PullProgress | None, None]:
    """Yields None when the pull has begun, and then its steps."""
    reader = PullReader()
    PULLS.join(ref, reader)
    try:
        yield None
        while (step := await reader.next()) is not None:
            if isinstance(step, Exception):
                raise step
            yield step
    finally:
        PULLS.leave(ref, reader)

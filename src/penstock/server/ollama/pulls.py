"""Fetches that clients asked for: each model once at a time, however many ask, and few at once.

A fetch goes on when its readers have left: the next one finds it done.
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
KEPT = 256  # steps of progress that a slow reader is behind; earlier ones are forgotten


class PullProgress(NamedTuple):
    what: str
    done: int
    total: int | None


class PullReader:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: deque[PullProgress | Exception | None] = deque(maxlen=KEPT)
        self._more = asyncio.Event()

    def tell(self, what: PullProgress | Exception | None) -> None:
        with suppress(RuntimeError):  # its server has ended
            self._loop.call_soon_threadsafe(self._take, what)

    def _take(self, what: PullProgress | Exception | None) -> None:
        self._told.append(what)
        self._more.set()

    async def next(self) -> PullProgress | Exception | None:
        while not self._told:
            self._more.clear()
            await self._more.wait()
        return self._told.popleft()


class Pulls:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[str, list[PullReader]] = {}  # of each fetch under way

    def join(self, ref: str, reader: PullReader) -> None:
        with self._lock:
            if ref in self._readers:
                return self._readers[ref].append(reader)
            if len(self._readers) >= MAX_PULLS:
                names = ", ".join(self._readers)
                raise Overloaded(f"{names} are being pulled, as many as may be at once: try again later")
            self._readers[ref] = [reader]
        threading.Thread(target=self._fetch, args=(ref,), name="penstock-pull", daemon=True).start()

    def leave(self, ref: str, reader: PullReader) -> None:
        with self._lock, suppress(KeyError, ValueError):
            self._readers[ref].remove(reader)

    def _fetch(self, ref: str) -> None:
        error = None
        try:
            store.fetch(ref, progress=lambda *step: self._tell(ref, PullProgress(*step)))
        except Exception as raised:
            error = raised
        self._tell(ref, error, last=True)

    def _tell(self, ref: str, what: PullProgress | Exception | None, last: bool = False) -> None:
        with self._lock:
            for reader in self._readers.pop(ref) if last else self._readers[ref]:
                reader.tell(what)


PULLS = Pulls()


async def pulling(ref: str) -> AsyncGenerator[PullProgress | None, None]:
    """The steps of a fetch to its end, after None when it has begun."""
    reader = PullReader()
    PULLS.join(ref, reader)
    try:
        yield None
        while (told := await reader.next()) is not None:
            if isinstance(told, Exception):
                raise told
            yield told
    finally:
        PULLS.leave(ref, reader)

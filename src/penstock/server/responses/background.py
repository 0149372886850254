"""A response made in the background: it goes on when its client leaves, and can be cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from penstock.errors import PenstockError
from penstock.server.chat.stream import Deltas
from penstock.server.responses.answer import ResponseWriter
from penstock.server.responses.events import ResponseEvent, framed

NOTHING_LEFT = b": all of it was told\n\n"

log = logging.getLogger(__name__)


class BackgroundResponse:
    """`streamed`: its events are kept, so that they can be told to whoever asks, from any of them on. `ended` is called
    once, at the end."""

    def __init__(self, answer: ResponseWriter, *, streamed: bool, ended: Callable[[], None]) -> None:
        self.streamed = streamed
        self.framing = answer.framing
        self.told: list[bytes] = []  # its events, where they are kept
        self.done = False
        self._answer = answer
        self._ended = ended
        self._news = asyncio.Event()
        self._keep(answer.queue())
        self.task = asyncio.create_task(self._run(answer.running))

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        if not self.done:
            self._finish(self._answer.cancel())

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Its events, as they come, after the one with this number."""
        first = at = after + 1
        while at < len(self.told) or not self.done:
            if at < len(self.told):
                yield self.told[at]
                at += 1
            else:
                await self._news.wait()
        if at == first:
            yield NOTHING_LEFT

    async def _run(self, running: Deltas) -> None:
        try:
            async with aclosing(running):
                async for _, delta in running:
                    self._keep(self._answer.events(delta))
            self._finish(())
        except PenstockError as error:
            self._finish(self._answer.fail(error))
        except Exception:
            log.exception("a response in the background failed")
            self._finish(
                self._answer.fail(PenstockError("the server failed while it answered; its log has the details"))
            )

    def _finish(self, events: Iterable[ResponseEvent]) -> None:
        self.done = True
        self._keep(events)
        self._ended()

    def _keep(self, events: Iterable[ResponseEvent]) -> None:
        for event in events:
            if self.streamed:
                self.told.append(framed(event))
        self._news.set()
        self._news.clear()

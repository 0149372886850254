"""Generates a response in the background: it continues when its client leaves, and can be cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from math import inf

from penstock.errors import PenstockError
from penstock.server.chat.schema_check import Deltas
from penstock.server.dialects.responses.answer import ResponseWriter
from penstock.server.dialects.responses.events import ResponseEvent, framed
from penstock.server.streams.buffer import ByteBudget, EventBuffer
from penstock.server.streams.kept import numbered

STREAM_BYTES = 16 * 2**20  # kept events of one response

log = logging.getLogger(__name__)


class BackgroundResponse:
    """Generates one response. If `streamed`, its events are kept, so that clients can read them from any event on.
    `on_end` is called once, at the end."""

    def __init__(self, writer: ResponseWriter, *, streamed: bool, on_end: Callable[[], None]) -> None:
        self.streamed = streamed
        self.framing = writer.framing.for_reader()
        self.buffer = EventBuffer(STREAM_BYTES, ByteBudget(inf))  # empty unless they are kept
        self.done = False
        self._writer = writer
        self._on_end = on_end
        self._keep(writer.queue())
        self.task = asyncio.create_task(self._run(writer.deltas))

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        if not self.done:
            self._finish(self._writer.cancel())

    async def _run(self, deltas: Deltas) -> None:
        try:
            await deltas(lambda _, delta: self._keep(self._writer.events(delta)))
            self._finish(())
        except PenstockError as error:
            self._finish(self._writer.fail(error))
        except Exception:
            log.exception("a response in the background failed")
            self._finish(
                self._writer.fail(
                    PenstockError("the server failed while it generated this response; its log has the details")
                )
            )

    def _finish(self, events: Iterable[ResponseEvent]) -> None:
        self.done = True
        self._keep(events)
        self.buffer.end()
        self._on_end()

    def _keep(self, events: Iterable[ResponseEvent]) -> None:
        for event in events:
            if self.streamed:
                self.buffer.append(numbered(self._writer.response.id, event.sequence_number, framed(event)))

"""Sends control messages to engines and waits for their answers."""

from __future__ import annotations

from typing import Any

from penstock.errors import error_of
from penstock.ipc.dispatch import RequestEngine
from penstock.ipc.request_stream import EventMailbox
from penstock.types import Event, Failed
from penstock.types.messages import Control


class ControlAnswers:
    """Keeps the control messages that are not answered yet. No two have the same id."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[RequestEngine, EventMailbox]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    async def ask(self, engine: RequestEngine, message: Control[Any]) -> Event:
        """Returns the answer; raises the error that it carries."""
        engine.send(message)
        box = EventMailbox()
        self._asked[message.id] = engine, box
        try:
            (event,) = await box.get()
        finally:
            self._asked.pop(message.id, None)
        if isinstance(event, Failed):
            raise error_of(event.code, event.message)
        return event

    def deliver(self, engine: RequestEngine, id: int, events: list[Event]) -> None:
        asked = self._asked.get(id)
        if asked is not None and asked[0] is engine:
            asked[1].put(events)

    def fail(self, code: str, message: str, engine: RequestEngine | None = None) -> None:
        """Fails the messages to one engine; by default, to all."""
        for id, (asked, box) in self._asked.items():
            if engine is None or asked is engine:
                box.put([Failed(id, code, message)])

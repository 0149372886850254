"""The one loop: take messages, step, send what happened. The same in a thread and in a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.engine.engine import Engine
from penstock.errors import PenstockError
from penstock.types import Event, Failed, Request, Stats


class Add(NamedTuple):
    request: Request


class Abort(NamedTuple):
    id: int


class Close(NamedTuple):
    pass


Message = Add | Abort | Close


class Inbox(Protocol):
    def take(self, wait: bool) -> list[Message]:
        """What has arrived; with `wait`, returns only when something has."""


def run(engine: Engine, inbox: Inbox, send: Callable[[list[Event], Stats], None]) -> None:
    """Until a Close arrives. While the engine is idle its backend may prepare for later, a little at a time; then it
    waits without cost."""
    unsettled = True
    while True:
        messages = inbox.take(wait=engine.idle and not unsettled)
        if engine.idle and not messages:
            unsettled = engine.settle()
            continue
        unsettled = True
        if any(isinstance(message, Close) for message in messages):
            return
        events = advance(engine, messages)
        if messages or events:
            send(events, engine.stats())


def advance(engine: Engine, messages: Sequence[Message]) -> list[Event]:
    """Applies messages other than Close, runs one step and returns what happened."""
    events = [event for message in messages for event in _apply(engine, message)]
    return events + engine.step()


def _apply(engine: Engine, message: Message) -> list[Event]:
    if isinstance(message, Abort):
        engine.abort(message.id)
    if not isinstance(message, Add):
        return []
    try:
        engine.add(message.request)
    except PenstockError as error:
        return [Failed(message.request.id, error.code, error.message)]
    return []

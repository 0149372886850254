"""Runs an engine in this process, with an inbox for its messages.

It needs neither asyncio nor a thread of its own: `LLM` steps it in the caller's thread, `InProcessClient` runs it in a
thread that it starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

from penstock import __version__
from penstock.engine.engine import Engine
from penstock.engine.loop import advance, run
from penstock.types import Event, Hello, Stats
from penstock.types.messages import Message


class ThreadInbox:
    """Takes messages from any thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Message] = SimpleQueue()

    def put(self, message: Message) -> None:
        self._queue.put(message)

    def take(self, wait: bool) -> list[Message]:
        """Returns the messages that have arrived; with `wait`, blocks until there is one."""
        messages = [self._queue.get()] if wait else []
        try:
            while True:
                messages.append(self._queue.get_nowait())
        except Empty:
            return messages


class InProcessEngine:
    """Holds an engine. Messages may be sent from any thread; one thread opens, steps and closes the engine."""

    engine: Engine  # once it is open

    def __init__(self, open: Callable[[], Engine], model: str = "") -> None:
        self._open = open
        self._model = model
        self._inbox = ThreadInbox()

    def open(self) -> Hello:
        """Opens the engine; raises what that raises."""
        self.engine = self._open()
        return hello_of(self.engine, self._model)

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    def step(self) -> dict[int, list[Event]]:
        return by_request(advance(self.engine, self._inbox.take(wait=False)))

    def run(self, deliver: Callable[[list[Event], Stats], None]) -> None:
        """Steps until a Close arrives; `deliver` gets the events of each step. While idle it waits for messages."""
        run(self.engine, self._inbox, lambda events, stats, _: deliver(events, stats))

    def close(self) -> None:
        self.engine.close()


def hello_of(engine: Engine, model: str, address: str = "") -> Hello:
    return Hello(__version__, os.getpid(), model, address=address, **engine.hello())


def by_request(events: Iterable[Event]) -> dict[int, list[Event]]:
    shares: dict[int, list[Event]] = {}
    for event in events:
        if event.seq in shares:
            shares[event.seq].append(event)
        else:
            shares[event.seq] = [event]
    return shares

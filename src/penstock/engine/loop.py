"""Runs an engine: takes messages, steps, sends what happened. It is the same in a thread and in a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.engine.engine import Engine
from penstock.engine.router_feed import NoBlockFeed
from penstock.types import BlockEvent, Event, Stats
from penstock.types.messages import Abort, Add, Close, Message

Send = Callable[[list[Event], Stats, list[BlockEvent]], None]


class Inbox(Protocol):
    """Receives the messages of clients."""

    def take(self, wait: bool) -> list[Message]:
        """Returns the messages that have arrived; with `wait`, it returns only when there is one."""


def run(engine: Engine, inbox: Inbox, send: Send) -> None:
    """Serves until a Close arrives. While the engine is idle its backend may prepare for later, a little at a time;
    then it waits without cost."""
    may_prepare = True
    recorder, feed = engine.recorder, engine.find(NoBlockFeed)
    while True:
        if must_wait := engine.idle and not may_prepare:
            recorder.wait()
        messages = inbox.take(wait=must_wait)
        recorder.take(len(messages))
        if engine.idle and not messages:
            recorder.prepare()
            began = time.perf_counter()
            may_prepare = engine.use_idle_moment()
            recorder.prepared(time.perf_counter() - began)
            continue
        may_prepare = True
        recorder.work(slow=engine.slow or not all(isinstance(message, Add | Abort) for message in messages))
        if any(isinstance(message, Close) for message in messages):
            return
        events = advance(engine, messages)
        blocks = feed.take()
        if messages or events or blocks:
            send(events, engine.stats(), blocks)
        recorder.sent()
        recorder.sent()


def advance(engine: Engine, messages: Sequence[Message]) -> list[Event]:
    for message in messages:
        engine.handle(message)
    return engine.step()

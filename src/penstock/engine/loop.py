"""Runs an engine: takes messages, steps, sends what happened. It is the same in a thread and in a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.engine.adapter_messages import AdapterMessage, ListAdapters, RegisterAdapter, UnregisterAdapter
from penstock.engine.carry.messages import Offer, Prefill, Release
from penstock.engine.engine import Engine
from penstock.engine.weight_messages import AbortAll, DescribeWeights, Pause, Resume, UpdateWeights, WeightMessage
from penstock.errors import PenstockError
from penstock.types import BlockEvent, Event, Failed, Request, Stats


class Add(NamedTuple):
    """Asks for a request to be answered."""

    request: Request


class Abort(NamedTuple):
    """Asks for a request to be ended."""

    id: int


class FlushCache(NamedTuple):
    """Asks for the prefix cache to be emptied."""


class Sleep(NamedTuple):
    """Asks for the device's memory to be given back once all requests have ended. The answer is a MemoryUse, or a
    Failed, with this id, which is taken from the same numbers as those of requests."""

    id: int


class Wake(NamedTuple):
    """Asks for what Sleep gave back to be taken again; it is answered as Sleep is."""

    id: int


class Close(NamedTuple):
    """Asks for the loop to end."""


ControlMessage = AdapterMessage | WeightMessage | Sleep | Wake | Offer | Prefill  # each has an answer
Message = Add | Abort | FlushCache | Close | Release | ControlMessage
Send = Callable[[list[Event], Stats, list[BlockEvent]], None]


class Inbox(Protocol):
    """Receives the messages of clients."""

    def take(self, wait: bool) -> list[Message]:
        """Returns what has arrived; with `wait`, it returns only when something has."""


def run(engine: Engine, inbox: Inbox, send: Send) -> None:
    """Serves until a Close arrives. While the engine is idle its backend may prepare for later, a little at a time;
    then it waits without cost."""
    may_prepare = True
    recorder = engine.recorder
    while True:
        if must_wait := engine.idle and not may_prepare:
            recorder.wait()
        messages = inbox.take(wait=must_wait)
        recorder.take(len(messages))
        if engine.idle and not messages:
            recorder.prepare()
            began = time.perf_counter()
            may_prepare = engine.prepare_in_idle()
            recorder.prepared(time.perf_counter() - began)
            continue
        may_prepare = True
        recorder.work(slow=engine.slow or not all(isinstance(message, Add | Abort) for message in messages))
        if any(isinstance(message, Close) for message in messages):
            return
        events = advance(engine, messages)
        blocks = engine.block_events()
        if messages or events or blocks:
            send(events, engine.stats(), blocks)


def advance(engine: Engine, messages: Sequence[Message]) -> list[Event]:
    """Applies messages other than Close, runs one step and returns what happened."""
    events = [event for message in messages for event in _apply(engine, message)]
    return engine.peers.offered(events + engine.step())


def _apply(engine: Engine, message: Message) -> list[Event]:
    if isinstance(message, Abort):
        engine.abort(message.id)
    if isinstance(message, FlushCache):
        engine.flush_cache()
    if isinstance(message, Offer | Release):
        return engine.peers.answer(message)
    if isinstance(message, Prefill):
        message = Add(engine.peers.prefill(message))
    id = 0
    try:
        if isinstance(message, Add):
            id = message.request.id
            engine.recorder.add(id)
            engine.add(message.request)
            engine.recorder.add()
        if isinstance(message, RegisterAdapter | UnregisterAdapter | ListAdapters):
            id = message.id
            engine.control_adapters(message)
        if isinstance(message, Pause | Resume | AbortAll | UpdateWeights | DescribeWeights):
            id = message.id
            engine.control_weights(message)
        if isinstance(message, Sleep):
            id = message.id
            engine.sleep(id)
        if isinstance(message, Wake):
            id = message.id
            engine.wake(id)
    except PenstockError as error:
        engine.recorder.add()  # nobody is added any more: it would be suspected of a death that comes later
        return [Failed(id, error.code, error.message)]
    return []

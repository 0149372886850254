"""Encodes the messages between a server and its engine process as msgpack. Both ends are the same version of
Penstock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from penstock.types import (
    Aborted,
    AdapterList,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    Event,
    Failed,
    Finished,
    Hello,
    MemoryUse,
    Offered,
    Stats,
    Tokens,
    WeightState,
)
from penstock.types.messages import MESSAGES, Message


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Is the engine's first message, when it can serve."""

    hello: Hello


class ClientJoined(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells the keeper of a shared host a client's number, which is part of its requests' ids."""

    number: int
    client: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Is the engine's only message, when it cannot start."""

    code: str
    message: str


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Carries the events of one step, for all requests of the client."""

    stats: Stats
    tokens: list[Tokens] = []
    finished: list[Finished] = []
    aborted: list[Aborted] = []
    failed: list[Failed] = []
    stored: list[BlockStored] = []  # blocks of the prefix cache, if the engine records them
    removed: list[BlockRemoved] = []
    adapters: list[AdapterList] = []  # answers to control messages
    weights: list[WeightState] = []  # the same, about pauses and weights
    memory: list[MemoryUse] = []  # likewise
    offered: list[Offered] = []  # likewise, about blocks
    received: int = 0  # requests that a shared host has had of the client since it joined

    def events(self) -> Iterator[Event]:
        answers: Iterator[Event] = chain(self.adapters, self.weights, self.memory, self.offered)
        return chain(self.tokens, self.finished, self.aborted, self.failed, answers)

    def block_events(self) -> list[BlockEvent]:
        return sorted([*self.stored, *self.removed], key=lambda event: event.number)


Answer = Ready | Refused | Step | ClientJoined

_encoder = msgspec.msgpack.Encoder()
_named: msgspec.msgpack.Decoder[tuple[str, msgspec.Raw]] = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_messages: dict[str, msgspec.msgpack.Decoder[Message]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in MESSAGES
}
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


TAKE_OVER = b"take over"  # is all that a standby reads, before any other message


def encode_message(message: Message) -> bytes:
    return _encoder.encode((type(message).__name__, message))


def decode_message(data: bytes) -> Message:
    """Returns the message; raises msgspec.DecodeError for other bytes."""
    name, fields = _named.decode(data)
    if name not in _messages:
        raise msgspec.ValidationError(f"no message is called {name[:40]!r}")
    return _messages[name].decode(fields)


def encode_answer(answer: Answer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(data: bytes) -> Answer:
    return _answers.decode(data)


def step(events: Sequence[Event], stats: Stats, blocks: Sequence[BlockEvent] = (), received: int = 0) -> Step:
    tokens, others = list[Tokens](), list[Event]()
    for each in events:
        if isinstance(each, Tokens):
            tokens.append(each)
        else:
            others.append(each)
    return Step(
        stats,
        tokens,
        [event for event in others if isinstance(event, Finished)],
        [event for event in others if isinstance(event, Aborted)],
        [event for event in others if isinstance(event, Failed)],
        [event for event in blocks if isinstance(event, BlockStored)],
        [event for event in blocks if isinstance(event, BlockRemoved)],
        [event for event in others if isinstance(event, AdapterList)],
        [event for event in others if isinstance(event, WeightState)],
        [event for event in others if isinstance(event, MemoryUse)],
        [event for event in others if isinstance(event, Offered)],
        received,
    )

"""The messages between a server and its engine process, as msgpack. Both ends are the same version of Penstock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import msgspec

from penstock.engine.loop import Abort, Add, Close, Message
from penstock.types import Aborted, Event, Failed, Finished, Hello, Request, Stats, Tokens


class ClientMessage(msgspec.Struct, frozen=True, array_like=True):
    """A client's message; with neither, it says Close."""

    add: Request | None = None
    abort: int | None = None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine's first word when it can serve."""

    hello: Hello


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine's only word when it cannot start."""

    code: str
    message: str


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What one step brought, for every request of the client at once."""

    stats: Stats
    tokens: list[Tokens] = []
    finished: list[Finished] = []
    aborted: list[Aborted] = []
    failed: list[Failed] = []

    def events(self) -> Iterator[Event]:
        return chain(self.tokens, self.finished, self.aborted, self.failed)


Answer = Ready | Refused | Step

_encoder = msgspec.msgpack.Encoder()
_asked = msgspec.msgpack.Decoder(ClientMessage)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode_message(message: Message) -> bytes:
    match message:
        case Add(request):
            return _encoder.encode(ClientMessage(add=request))
        case Abort(id):
            return _encoder.encode(ClientMessage(abort=id))
        case Close():
            return _encoder.encode(ClientMessage())


def decode_message(data: bytes) -> Message:
    asked = _asked.decode(data)
    if asked.add is not None:
        return Add(asked.add)
    return Close() if asked.abort is None else Abort(asked.abort)


def encode_answer(answer: Answer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(data: bytes) -> Answer:
    return _answers.decode(data)


def step(events: list[Event], stats: Stats) -> Step:
    return Step(
        stats,
        [event for event in events if isinstance(event, Tokens)],
        [event for event in events if isinstance(event, Finished)],
        [event for event in events if isinstance(event, Aborted)],
        [event for event in events if isinstance(event, Failed)],
    )

"""Defines the messages between a shared engine host and its clients that wire.py does not have.

A client's message has one frame if it is for the engine (wire.py), and two if it is about the connection: the first one
is empty then. A client begins with Join. The answer is Joined and a snapshot of the prefix cache, or Refused.
"""

from __future__ import annotations

import msgspec

from penstock.ipc.wire import Refused, Step
from penstock.types import BlockSnapshot, Hello

PROTOCOL = 1  # newest version
OLDEST = 1  # oldest version still understood

NOT_JOINED, WRONG_SECRET, WRONG_PROTOCOL, MALFORMED = "not_joined", "wrong_secret", "wrong_protocol", "malformed"


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks to be served. A client that joins again under its name loses its requests in flight."""

    secret: str
    client: str  # its name, which no other client has
    protocol: int = PROTOCOL  # the newest that it speaks
    oldest: int = OLDEST


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Shows that a client lives."""


class AskSnapshot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for a snapshot of the prefix cache, since events were missed."""


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Announces that a client leaves; its requests are aborted."""


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Welcomes a client. Its requests have the ids `number << ID_BITS | id` in the engine."""

    hello: Hello
    protocol: int  # the version in use
    number: int


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Carries what the prefix cache holds."""

    blocks: BlockSnapshot


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells all clients that the engine ends for no fault of any request."""

    reason: str


LinkMessage = Join | Beat | AskSnapshot | Leave
LinkAnswer = Joined | Refused | Snapshot | Farewell | Step

ID_BITS = 40
ID_MASK = (1 << ID_BITS) - 1

_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[LinkMessage] = msgspec.msgpack.Decoder(LinkMessage)
_answers: msgspec.msgpack.Decoder[LinkAnswer] = msgspec.msgpack.Decoder(LinkAnswer)


def encode_link(message: LinkMessage) -> tuple[bytes, bytes]:
    return b"", _encoder.encode(message)


def decode_link(data: bytes) -> LinkMessage:
    return _messages.decode(data)


def encode_link_answer(answer: LinkAnswer) -> bytes:
    return _encoder.encode(answer)


def decode_link_answer(data: bytes) -> LinkAnswer:
    return _answers.decode(data)


def common_protocol(join: Join) -> int | None:
    """Returns the newest protocol that this version and a client both speak; None: there is none."""
    newest = min(PROTOCOL, join.protocol)
    return newest if newest >= max(OLDEST, join.oldest) else None

"""Encodes the messages between a server and its engine process as msgpack. Both ends are the same version of
Penstock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from penstock.engine.adapter_messages import ListAdapters, RegisterAdapter, UnregisterAdapter
from penstock.engine.carry.messages import Offer, Prefill, Release
from penstock.engine.loop import Abort, Add, Close, FlushCache, Message, Sleep, Wake
from penstock.engine.weight_messages import AbortAll, DescribeWeights, Pause, Resume, UpdateWeights
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
    Request,
    Stats,
    Tokens,
    WeightState,
)


class ClientMessage(msgspec.Struct, frozen=True, array_like=True):
    """Carries a client's message: the one whose field is set, or Close if none is."""

    add: Request | None = None
    abort: int | None = None
    flush: bool = False
    register: RegisterAdapter | None = None
    unregister: UnregisterAdapter | None = None
    list_adapters: ListAdapters | None = None
    pause: Pause | None = None
    resume: Resume | None = None
    abort_all: AbortAll | None = None
    update_weights: UpdateWeights | None = None
    describe_weights: DescribeWeights | None = None
    sleep: Sleep | None = None
    wake: Wake | None = None
    offer: Offer | None = None
    release: Release | None = None
    prefill: Prefill | None = None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Is the engine's first message, when it can serve."""

    hello: Hello


class ClientJoined(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells whoever keeps a shared host which number the ids of a client's requests have."""

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
        answers = (self.adapters, self.weights, self.memory, self.offered)
        return chain(self.tokens, self.finished, self.aborted, self.failed, *answers)

    def block_events(self) -> list[BlockEvent]:
        """Returns what entered and left the prefix cache, in the order in which it happened."""
        return sorted([*self.stored, *self.removed], key=lambda event: event.number)


Answer = Ready | Refused | Step | ClientJoined

_encoder = msgspec.msgpack.Encoder()
_messages = msgspec.msgpack.Decoder(ClientMessage)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


TAKE_OVER = b"take over"  # is all that a standby reads, before any other message


def encode_message(message: Message) -> bytes:
    match message:
        case Add(request):
            return _encoder.encode(ClientMessage(add=request))
        case Abort(id):
            return _encoder.encode(ClientMessage(abort=id))
        case FlushCache():
            return _encoder.encode(ClientMessage(flush=True))
        case RegisterAdapter():
            return _encoder.encode(ClientMessage(register=message))
        case UnregisterAdapter():
            return _encoder.encode(ClientMessage(unregister=message))
        case ListAdapters():
            return _encoder.encode(ClientMessage(list_adapters=message))
        case Pause():
            return _encoder.encode(ClientMessage(pause=message))
        case Resume():
            return _encoder.encode(ClientMessage(resume=message))
        case AbortAll():
            return _encoder.encode(ClientMessage(abort_all=message))
        case UpdateWeights():
            return _encoder.encode(ClientMessage(update_weights=message))
        case DescribeWeights():
            return _encoder.encode(ClientMessage(describe_weights=message))
        case Sleep():
            return _encoder.encode(ClientMessage(sleep=message))
        case Wake():
            return _encoder.encode(ClientMessage(wake=message))
        case Offer():
            return _encoder.encode(ClientMessage(offer=message))
        case Prefill():
            return _encoder.encode(ClientMessage(prefill=message))
        case Release():
            return _encoder.encode(ClientMessage(release=message))
        case Close():
            return _encoder.encode(ClientMessage())


def decode_message(data: bytes) -> Message:
    message = _messages.decode(data)
    if message.add is not None:
        return Add(message.add)
    if message.flush:
        return FlushCache()
    if about_adapters := message.register or message.unregister or message.list_adapters:
        return about_adapters
    if about_pauses := message.pause or message.resume or message.abort_all:
        return about_pauses
    if about_weights := message.update_weights or message.describe_weights:
        return about_weights
    if about_sleep := message.sleep or message.wake:
        return about_sleep
    if about_blocks := message.offer or message.release or message.prefill:
        return about_blocks
    return Close() if message.abort is None else Abort(message.abort)


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

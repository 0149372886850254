"""Keeps an engine's requests in memory that outlives the process, for a bundle about its death.

The keeper of a shared engine does not see its requests. Each has a slot of that memory while it is in flight. Untouched
pages take no memory.
"""

from __future__ import annotations

from contextlib import suppress
from mmap import mmap
from struct import Struct
from typing import NamedTuple

import msgspec

from penstock.config import OFF, Config
from penstock.ipc.request_shapes import shape_of, with_made_up
from penstock.types import Request

SLOTS = 512  # requests in flight that are kept
SLOT_BYTES = 2**18
REQUESTS_BYTES = SLOTS * SLOT_BYTES
LENGTH = Struct("<I")  # bytes in a slot; 0: empty


class FlightRequest(NamedTuple):
    """Describes a request as it was sent. It has its own tokens if they are kept and fit."""

    prompt_tokens: int
    generated_tokens: int
    request: Request

    def restored(self, vocab: int) -> Request:
        if self.request.prompt:
            return self.request
        return with_made_up(self.request, self.prompt_tokens, self.generated_tokens, vocab)


def keeps_requests(config: Config) -> bool:
    """Returns whether the requests of an engine are kept in such memory: others send them, and bundles are written."""
    return bool(config.listen) and config.post_mortem != OFF


class FlightRequests:
    """Writes requests to memory of REQUESTS_BYTES when they arrive, and takes them out when they end. `tokens`: what
    was asked is kept too."""

    def __init__(self, memory: bytearray | mmap, *, tokens: bool = False) -> None:
        self._memory = memory
        self._tokens = tokens
        self._slots: dict[int, int] = {}  # request id -> slot
        self._free = list(reversed(range(SLOTS)))

    def add(self, request: Request) -> None:
        if not self._free or request.id in self._slots:
            return
        entry = FlightRequest(len(request.prompt), len(request.generated), shape_of(request))
        data = msgspec.msgpack.encode(entry)
        if self._tokens:
            whole = msgspec.msgpack.encode(entry._replace(request=request._replace(pull=None)))
            data = whole if LENGTH.size + len(whole) <= SLOT_BYTES else data
        slot = self._slots[request.id] = self._free.pop()
        at = slot * SLOT_BYTES
        self._memory[at + LENGTH.size : at + LENGTH.size + len(data)] = data
        LENGTH.pack_into(self._memory, at, len(data))  # last: the process may end at any time

    def end(self, id: int) -> None:
        slot = self._slots.pop(id, None)
        if slot is not None:
            LENGTH.pack_into(self._memory, slot * SLOT_BYTES, 0)
            self._free.append(slot)


def read_requests(memory: bytearray | mmap, vocab: int) -> list[Request]:
    """Returns the requests in such memory that nobody writes any more. What an engine has damaged before it
    died is left out."""
    found = []
    for at in range(0, REQUESTS_BYTES, SLOT_BYTES):
        (length,) = LENGTH.unpack_from(memory, at)
        if length:
            data = memory[at + LENGTH.size : at + LENGTH.size + length]
            with suppress(msgspec.DecodeError):
                found.append(msgspec.msgpack.decode(data, type=FlightRequest).restored(vocab))
    return found

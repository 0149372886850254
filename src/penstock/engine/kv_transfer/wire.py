"""Defines what the reader of an offer and the engine that made it send each other.

reader  magic, the id of the offer, the epoch, the first block and how many
engine  status, places and bytes of a block in the staging memory; then for each block its header: chain hash, the
        parent's, tokens, and for each layer group the place (-1: none), generation and CRC; then, over TCP, for each
        layer group its contents and the generation that its place had afterwards
reader  a byte, once it needs nothing more
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import socket  # takes long, and is for those only who exchange blocks

MAGIC = b"PENSTKO1"  # the last character is the version
REQUEST = Struct("<8s16sQII")
REPLY = Struct("<B7xQQ")
GENERATION = Struct("<Q")
DONE = b"."
SECONDS = 10.0  # timeout of either side

UNKNOWN, OUT_OF_RANGE, USED, EXPIRED = "unknown", "out_of_range", "used", "expired"
OTHER_EPOCH, FOREIGN, BUSY = "other_epoch", "foreign", "busy"
STATUS = ("", UNKNOWN, OUT_OF_RANGE, USED, EXPIRED, OTHER_EPOCH, FOREIGN, BUSY)  # a status is sent as its index


class TransferRefused(Exception):
    """Says in one word why blocks cannot be read, or are not those that were asked for."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BlockPart(NamedTuple):
    """Describes a block of one layer group."""

    place: int
    generation: int
    crc: int


class BlockHeader(NamedTuple):
    """Describes a block of tokens."""

    hash: bytes
    parent: bytes
    tokens: bytes
    parts: tuple[BlockPart, ...]  # one for each layer group

    def pack(self) -> bytes:
        fields = (value for part in self.parts for value in part)
        return header_struct(len(self.tokens), len(self.parts)).pack(self.hash, self.parent, self.tokens, *fields)

    @classmethod
    def unpack(cls, data: bytes, token_bytes: int, groups: int) -> BlockHeader:
        hash, parent, tokens, *rest = header_struct(token_bytes, groups).unpack(data)
        return cls(hash, parent, tokens, tuple(BlockPart(*rest[at : at + 3]) for at in range(0, len(rest), 3)))


def header_struct(token_bytes: int, groups: int) -> Struct:
    return Struct(f"<16s16s{token_bytes}s{'qQI' * groups}")


def receive(connection: socket.socket, size: int) -> bytes:
    """Returns `size` bytes; raises OSError if the other end closes first."""
    data = bytearray(size)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fills memory with what arrives; raises OSError if the other end goes before."""
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("the other end has closed the connection")
        target = target[count:]

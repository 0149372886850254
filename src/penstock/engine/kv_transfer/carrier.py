"""Defines the seam between those who offer and read blocks and the ways in which blocks travel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.core.prefix import PrefixNode
from penstock.engine.kv_transfer.staging import StagedBlocks
from penstock.engine.kv_transfer.wire import REPLY, BlockPart

if TYPE_CHECKING:
    import socket


class StagedPart(NamedTuple):
    """Is a block of one layer group that is to be staged."""

    node: PrefixNode
    group: int
    place: int
    hash: bytes  # the chain hash, with which the block's CRC begins


class Listener(Protocol):
    """Accepts readers for an engine that offers blocks."""

    sends_contents: bool  # whether blocks travel through the connection

    @property
    def address(self) -> str:
        """Returns where readers find it: what carries the blocks, a colon, and the rest."""

    def accept(self) -> socket.socket:
        """Returns a connection with the next reader; raises OSError once it is closed."""

    def serving(self) -> AbstractContextManager[None]: ...

    def welcome(self, connection: socket.socket, staging: StagedBlocks) -> None:
        """Tells a reader that it may read, and how the staging memory is laid out."""

    def send(self, connection: socket.socket, staging: StagedBlocks, part: BlockPart) -> None:
        """Sends the contents of a block whose header was sent, where they travel through the connection."""

    def close(self) -> None:
        """Accepts nobody any more."""


class OfferSource(Protocol):
    """Reads blocks of an offer over one connection."""

    scheme: str  # names the carrier

    @property
    def connection(self) -> socket.socket: ...

    def enter(self) -> int:
        """Receives what the engine answers to a request; returns its status."""

    def read(self, part: BlockPart, target: memoryview) -> bool:
        """Reads the block whose header has just arrived into memory; returns whether its place had the same generation
        before and after."""

    def close(self) -> None: ...


def welcome_of(staging: StagedBlocks) -> bytes:
    return REPLY.pack(0, staging.places, staging.block_bytes)

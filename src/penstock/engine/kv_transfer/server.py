"""Serves readers of offered blocks, in threads of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from penstock.engine.kv_disk.segment import block_crc
from penstock.engine.kv_transfer.carrier import Listener
from penstock.engine.kv_transfer.leases import LeasedBlock, Leases
from penstock.engine.kv_transfer.wire import (
    BUSY,
    DONE,
    FOREIGN,
    MAGIC,
    REPLY,
    REQUEST,
    SECONDS,
    STATUS,
    BlockHeader,
    BlockPart,
    TransferRefused,
    receive,
)

READERS = 8  # at once
HURRIED = 0.1  # seconds that an excess reader has to send its request
NO_PART = BlockPart(-1, 0, 0)


class OfferServer:
    """Sends blocks of leases to those who ask for them on any of its listeners."""

    def __init__(self, leases: Leases, listeners: Sequence[Listener]) -> None:
        self._leases = leases
        self._staging = leases.staging
        self._listeners = listeners
        self._room = threading.Semaphore(READERS)
        for listener in listeners:
            threading.Thread(target=self._listen, args=[listener], name="penstock-offers", daemon=True).start()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(listener.address for listener in self._listeners)

    def close(self) -> None:
        """Accepts nobody any more. Those who read now may fail."""
        for listener in self._listeners:
            with suppress(OSError):
                listener.close()

    def _listen(self, listener: Listener) -> None:
        self._staging.prepare()
        with suppress(OSError):  # it was closed
            while True:
                connection = listener.accept()
                if self._room.acquire(blocking=False):
                    serve = threading.Thread(target=self._serve, args=[listener, connection], daemon=True)
                    serve.start()
                else:
                    self._turn_away(connection)

    def _turn_away(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(HURRIED)
            receive(connection, REQUEST.size)
            self._refuse(connection, BUSY)

    def _serve(self, listener: Listener, connection: socket.socket) -> None:
        """Serves one reader. Any error with it only ends its lease."""
        try:
            with suppress(OSError), connection, listener.serving():
                connection.settimeout(SECONDS)
                self._read(listener, connection)
        finally:
            self._room.release()

    def _read(self, listener: Listener, connection: socket.socket) -> None:
        magic, id, *wanted = REQUEST.unpack(receive(connection, REQUEST.size))
        if magic != MAGIC:
            return self._refuse(connection, FOREIGN)
        try:
            blocks = self._leases.open(id, *wanted)
        except TransferRefused as refused:
            return self._refuse(connection, refused.reason)
        sent = 0
        try:
            listener.welcome(connection, self._staging)
            for some in [[block] for block in blocks] if listener.sends_contents else [blocks]:
                self._send(listener, connection, some)
                sent += sum(not block.of_state for block in some)
            receive(connection, len(DONE))
        finally:
            self._leases.end(id, sent)

    def _send(self, listener: Listener, connection: socket.socket, blocks: Sequence[LeasedBlock]) -> None:
        headers = [
            BlockHeader(*block[:3], tuple(self._part(block, group) for group in range(len(block.copies))))
            for block in blocks
        ]
        connection.sendall(b"".join(header.pack() for header in headers))
        if listener.sends_contents:
            for part in (part for header in headers for part in header.parts if part.place >= 0):
                listener.send(connection, self._staging, part)

    def _part(self, block: LeasedBlock, group: int) -> BlockPart:
        """Describes a staged block. If its place was taken by another meanwhile, its reader will find another
        generation there."""
        place, generation, crc = block.copies[group]
        if place < 0:
            return NO_PART
        if crc is None:
            crc = block_crc(block.hash, self._staging.read(place))
        return BlockPart(place, generation, crc)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        if reason in (BUSY, FOREIGN):
            self._leases.refused[reason] += 1
        connection.sendall(REPLY.pack(STATUS.index(reason), 0, 0))

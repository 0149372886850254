"""Records which blocks enter and leave the prefix cache, for whoever routes requests to where their prefix is."""

from __future__ import annotations

from penstock.types import BlockEvent, BlockRemoved, BlockStored


class BlockEvents:
    """Numbers the events of one epoch from 0 and keeps them until they are taken."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._number = 0
        self._events: list[BlockEvent] = []

    def stored(self, hash: bytes, parent: bytes, tokens: tuple[int, ...]) -> None:
        """Records that a block entered the prefix cache."""
        self._events.append(BlockStored(self._number, self._epoch, hash, parent, tokens))
        self._number += 1

    def removed(self, hash: bytes) -> None:
        """Records that a block left the prefix cache."""
        self._events.append(BlockRemoved(self._number, self._epoch, hash))
        self._number += 1

    def take(self) -> list[BlockEvent]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

"""Defines the seam to device memory that several processes on one device share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SharedRoom(Protocol):
    """Is memory of the device with places for copies of KV blocks, which other processes on that device can open."""

    handle: bytes  # opens it
    places: int

    def write(self, blocks: Sequence[int], places: Sequence[int]) -> list[int]:
        """Copies blocks to places after all launched steps and waits; returns each block's checksum (checksum.py)."""

    def close(self) -> None: ...


class OpenedRoom(Protocol):
    """Is the shared room of another process."""

    def read(self, places: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Copies places to own blocks after all launched steps and waits; returns the checksum of each copy."""

    def close(self) -> None: ...


class DeviceSharing(Protocol):
    """Copies KV blocks between processes that compute on one device, without host memory."""

    name: str  # the device's, in all processes

    def share(self, places: int) -> SharedRoom:
        """Returns room for at most `places` blocks, fewer if memory is short. Raises OSError for none."""

    def open(self, handle: bytes) -> OpenedRoom:
        """Returns a room of another process. Raises OSError if it cannot be opened, or has blocks of another size."""

"""What the server asks of an engine client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from penstock.ipc.client import EngineClient
from penstock.types import Event, Request


class Client(EngineClient, Protocol):
    """A client that also says how its engine fares, and whose streams can be closed."""

    restarts: int
    trouble: str  # why there is no engine, while there is none

    def submit(self, request: Request) -> AsyncGenerator[list[Event], None]: ...

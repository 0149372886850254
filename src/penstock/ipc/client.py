"""How the server and the Python API talk to an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from penstock.types import Event, Hello, Request, Stats


class EngineClient(Protocol):
    """Its twins: ipc/inprocess.py (a thread) and ipc/spawn.py (a process that is restarted when it dies)."""

    @property
    def hello(self) -> Hello | None:
        """None while there is no engine."""

    @property
    def trouble(self) -> str:
        """Why there is none, then."""

    @property
    def restarts(self) -> int: ...

    @property
    def stats(self) -> Stats:
        """The engine's last word on itself; it speaks after every step and every message."""

    async def start(self) -> Hello: ...

    def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """Events of one request, a list per step, ending with Finished, Aborted or Failed. Leaving the generator
        early aborts the request. Raises EngineUnavailable when there is no engine to ask."""

    def next_id(self) -> int: ...

    async def close(self) -> None: ...

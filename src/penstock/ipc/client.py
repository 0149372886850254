"""Defines how the server and the Python API use an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from penstock.types import AdapterInfo, Event, Hello, MemoryUse, Request, Stats


class EngineClient(Protocol):
    """Implemented by ipc/inprocess.py (a thread) and ipc/spawn.py (a process that is restarted when it dies)."""

    @property
    def hello(self) -> Hello | None:
        """Returns what the engine said about itself when it started; None while there is no engine."""

    @property
    def unavailable_reason(self) -> str:
        """Returns why there is no engine, while there is none."""

    @property
    def restarts(self) -> int: ...

    @property
    def in_flight(self) -> int:
        """Returns how many requests have not had their last event."""

    @property
    def stats(self) -> Stats:
        """Returns the engine's latest statistics. They arrive after every step and every message."""

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Returns the adapters that requests may name, by name."""

    async def start(self) -> Hello: ...

    def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """Yields the events of one request, a list per step, up to Finished, Aborted or Failed. Leaving the generator
        early aborts the request. Raises EngineUnavailable if there is no engine."""

    def abort(self, id: int) -> None:
        """Ends a request now; its last event still arrives, with a report of what happened to it."""

    def flush_cache(self) -> None:
        """Empties the prefix cache; running requests keep the blocks they hold."""

    async def register_adapter(self, name: str, path: str, scale: float = 1.0, *, replace: bool = False) -> AdapterInfo:
        """Lets requests name an adapter from now on; raises AdapterError if it does not fit the model or another has
        the name. With `replace` it takes that one's place."""

    async def unregister_adapter(self, name: str) -> AdapterInfo:
        """Forgets an adapter; raises AdapterNotFound if there is none by that name."""

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """Returns all registered adapters."""

    async def sleep(self) -> MemoryUse:
        """Has the engine give its device memory back once all requests have ended, and stay; its hello says whether it
        can. Prefixes that were cached are forgotten. The next request wakes it."""

    async def wake(self) -> MemoryUse:
        """Has the engine take its device memory again; raises OutOfMemory, and it still sleeps, if there is too
        little. An engine that is awake stays so."""

    def next_id(self) -> int: ...

    async def close(self) -> None: ...

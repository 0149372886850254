"""A line to an engine that can fail in the ways in which networks and stopped processes do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

from tests.server.conftest import WAIT

DRIP_SECONDS = 0.3  # between two bytes of a dripping line


class Fault(Enum):
    NONE = "none"
    SILENT = "silent"  # connections are accepted and requests are read, as by the system of a stopped process
    HALF_OPEN = "half open"  # as when the other machine has gone: nothing is accepted or read, and nothing is closed
    DRIP = "drip"  # every answer comes, a byte now and then
    FULL = "full"  # further connections are not served, as by a server whose threads all have one


class FaultyLine:
    """Passes bytes to a port and back, unless it has a fault. A fault holds for connections that are open, too."""

    def __init__(self, port: int) -> None:
        self.fault = Fault.NONE
        self.url = ""
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, started: threading.Event, stopping: asyncio.Event) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stopping.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._begin(self._connect(reader, writer))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self.fault is Fault.FULL:
            await asyncio.sleep(0.02)
        behind_reader, behind = await asyncio.open_connection("127.0.0.1", self._port)
        self._begin(self._pass(reader, behind, False))
        self._begin(self._pass(behind_reader, writer, True))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, answers: bool) -> None:
        with suppress(OSError):
            try:
                while data := await source.read(65536):
                    await self._until_passing(answers)
                    if answers and self.fault is Fault.DRIP:
                        await self._drip(data, to)
                    else:
                        to.write(data)
                        await to.drain()
            finally:
                to.close()

    async def _until_passing(self, answers: bool) -> None:
        while self.fault is Fault.HALF_OPEN or (answers and self.fault is Fault.SILENT):
            await asyncio.sleep(0.02)

    async def _drip(self, data: bytes, to: asyncio.StreamWriter) -> None:
        for at in range(len(data)):
            to.write(data[at : at + 1])
            await to.drain()
            if self.fault is Fault.DRIP:
                await asyncio.sleep(DRIP_SECONDS)


@contextmanager
def faulty_line(url: str) -> Iterator[FaultyLine]:
    """Runs a line to the engine at a URL."""
    line, started = FaultyLine(int(url.rpartition(":")[2])), threading.Event()
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(line.serve(started, stopping),), daemon=True)
    thread.start()
    try:
        assert started.wait(WAIT)
        yield line
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(WAIT)
        loop.close()

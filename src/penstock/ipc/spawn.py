"""An engine in a process of its own: watched, and restarted when it dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence

from penstock.config import Config
from penstock.engine.loop import Abort, Message
from penstock.errors import EngineUnavailable, PenstockError
from penstock.ipc import wire
from penstock.ipc.process import EngineProcess
from penstock.ipc.streams import RequestStreams
from penstock.types import Event, Hello, Request, Stats

log = logging.getLogger(__name__)

HOST = (sys.executable, "-m", "penstock.ipc.host")
PAUSES = (0.05, 0.5, 1.0, 2.0, 4.0)  # seconds before each new try, while engines die young
YOUNG = 10.0  # seconds
GRACE = 5.0  # seconds an engine has to leave by itself


class ProcessClient:
    def __init__(self, config: Config, command: Sequence[str] = HOST, pauses: Sequence[float] = PAUSES) -> None:
        self.hello: Hello | None = None
        self.stats = Stats()
        self.restarts = 0
        self.trouble = "the engine has not been started"
        self._config = config
        self._command = command
        self._pauses = pauses
        self._ids = itertools.count(1)
        self._streams = RequestStreams()
        self._engine: EngineProcess | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> Hello:
        """Starts the engine; what keeps it from starting is raised here. Starting twice changes nothing."""
        if self._keeper is None:
            await self._launch()
            self._keeper = asyncio.create_task(self._keep())
        if self.hello is None:
            raise EngineUnavailable(self.trouble)
        return self.hello

    def submit(self, request: Request) -> AsyncGenerator[list[Event], None]:
        if self.hello is None:
            raise EngineUnavailable(self.trouble)
        return self._streams.follow(request, self._send)

    def abort(self, id: int) -> None:
        self._send(Abort(id))

    def next_id(self) -> int:
        return next(self._ids)

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        await self._lose("the engine is closed")

    def _send(self, message: Message) -> None:
        if self._engine is None:
            raise EngineUnavailable(self.trouble)
        self._engine.send(message)

    def _take(self, step: wire.Step) -> None:
        self.stats = step.stats
        self._streams.deliver(step.events())

    async def _launch(self) -> None:
        self._engine = await EngineProcess.launch(self._command, self._config)
        self.hello = self._engine.hello

    async def _lose(self, trouble: str) -> None:
        """No engine from here on: every request under way ends, and new ones are refused."""
        engine, self._engine, self.hello, self.stats = self._engine, None, None, Stats()
        self.trouble = trouble
        self._streams.fail("engine_died", trouble)
        if engine is not None:
            await engine.end(GRACE)

    async def _keep(self) -> None:
        """Serves from one engine process after another, until too many in a row die young."""
        pauses = iter(self._pauses)
        while self._engine is not None:
            born = time.monotonic()
            pid = self._engine.hello.pid
            ending = await self._engine.read(self._take)
            if time.monotonic() - born > YOUNG or self.stats.generated_tokens:
                pauses = iter(self._pauses)
            trouble = f"the engine process {pid} {ending}"
            log.error("%s; a new one is started", trouble)
            await self._lose(f"{trouble}; a new one is being started: send the request again")
            await self._revive(trouble, pauses)

    async def _revive(self, trouble: str, pauses: Iterator[float]) -> None:
        for pause in pauses:
            await asyncio.sleep(pause)
            try:
                await self._launch()
            except PenstockError as error:
                trouble = str(error)
                log.error("the engine could not be restarted: %s", trouble)
            else:
                self.restarts += 1
                return
        self.trouble = f"the engine failed {len(self._pauses) + 1} times in a row and is given up: {trouble}"
        log.error("%s", self.trouble)

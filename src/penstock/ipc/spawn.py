"""Runs an engine in its own process, which is watched and restarted when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.config import Config, parse_adapter
from penstock.engine.adapter_messages import RegisterAdapter
from penstock.engine.loop import Message, Sleep
from penstock.errors import EngineUnavailable, PenstockError
from penstock.ipc import wire
from penstock.ipc.launchers import Launcher, SpawnLauncher
from penstock.ipc.process import EngineProcess
from penstock.ipc.streams import RequestClient
from penstock.types import AdapterInfo, Hello, Stats, WeightState

log = logging.getLogger(__name__)

PAUSES = (0.05, 0.5, 1.0, 2.0, 4.0)  # seconds before each restart, while engines die early
EARLY = 10.0  # seconds: an engine that dies within them has died early
SPAWNING = SpawnLauncher()
GRACE = 5.0  # seconds that an engine has to exit by itself


class ProcessClient(RequestClient):
    """Restarts the engine process when it dies, until it has died early too often."""

    def __init__(self, config: Config, launcher: Launcher = SPAWNING, pauses: Sequence[float] = PAUSES) -> None:
        super().__init__()
        self._config = config
        self._launcher = launcher
        self._pauses = pauses
        self._engine: EngineProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None

    async def start(self, *, yielding: bool = False) -> Hello:
        """Starts the engine; raises what keeps it from starting. Starting twice changes nothing."""
        if self._keeper is None:
            await self._launch(yielding)
            self._keeper = asyncio.create_task(self._keep_running())
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self.hello

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        await self._lose("the engine is closed")

    async def unregister_adapter(self, name: str) -> AdapterInfo:
        info = await super().unregister_adapter(name)
        kept = tuple(text for text in self._config.adapter if parse_adapter(text).name != name)
        self._config = replace(self._config, adapter=kept)  # an engine that is started again has forgotten it too
        return info

    def _send(self, message: Message) -> None:
        if self._engine is None:
            raise EngineUnavailable(self.unavailable_reason)
        self._engine.send(message)

    def _take(self, step: wire.Step) -> None:
        self.stats = step.stats
        self._streams.deliver(step.events())

    async def _launch(self, yielding: bool = False) -> None:
        self._engine = await EngineProcess.launch(self._launcher, replace(self._config, yielding=yielding))
        self.hello = self._engine.hello
        self.adapters = {info.name: info for info in self.hello.adapters} | self.adapters

    def _tell_again(self) -> None:
        """Tells an engine that was started again what the one before was told: adapters that were registered while it
        ran, and that it should sleep."""
        known = {(info.name, info.path, info.scale) for info in self.hello.adapters} if self.hello else set()
        for info in self.adapters.values():
            if (info.name, info.path, info.scale) not in known:
                self._send(RegisterAdapter(self.next_id(), info.name, info.path, info.scale, replace=True))
        if self._asleep and self.hello is not None and self.hello.can_sleep:
            self._send(Sleep(self.next_id()))

    async def _restore_weights(self, before: WeightState) -> None:
        """Brings an engine that was started again to the weights, and to the pause, that the one before had. Requests
        wait meanwhile. Weights that cannot be read any more are left out: answers tell which ones computed them."""
        await self.pause()
        try:
            if before.updates:
                await self.update_weights(before.path, before.version)
        except PenstockError as error:
            log.error("the engine has its first weights again: %s", error)
        if not before.paused:
            await self.resume()

    async def _lose(self, reason: str) -> None:
        """Ends all requests in flight and refuses new ones for this reason: there is no engine from now on."""
        engine, self._engine, self.hello, self.stats = self._engine, None, None, Stats()
        self.unavailable_reason = reason
        self._streams.fail("engine_died", reason)
        if engine is not None:
            await engine.end(GRACE)

    async def _keep_running(self) -> None:
        """Runs one engine process after another, until too many in a row die early."""
        pauses = iter(self._pauses)
        while self._engine is not None:
            started = time.monotonic()
            pid = self._engine.hello.pid
            ending = await self._engine.read(self._take)
            if time.monotonic() - started > EARLY or self.stats.generated_tokens:
                pauses = iter(self._pauses)
            reason = f"the engine process {pid} {ending}"
            log.error("%s; a new one is started", reason)
            await self._lose(f"{reason}; a new one is being started: send the request again")
            await self._restart(reason, pauses)

    async def _restart(self, reason: str, pauses: Iterator[float]) -> None:
        for pause in pauses:
            await asyncio.sleep(pause)
            try:
                await self._launch()
            except PenstockError as error:
                reason = str(error)
                log.error("the engine could not be restarted: %s", reason)
            else:
                self.restarts += 1
                self._tell_again()
                before, self.weights = self.weights, WeightState()
                if before.updates or before.paused:
                    self._restoring = asyncio.create_task(self._restore_weights(before))
                return
        self.unavailable_reason = f"the engine failed {len(self._pauses) + 1} times in a row and is given up: {reason}"
        log.error("%s", self.unavailable_reason)

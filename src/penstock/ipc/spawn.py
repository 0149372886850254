"""Runs an engine in its own process, which is watched and restarted when it dies or hangs. The next one resumes what
the last one was answering."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.config import OFF, Config, parse_adapter
from penstock.engine.flight_recorder import FlightRecord
from penstock.errors import EngineUnavailable, PenstockError
from penstock.ipc import post_mortem, wire
from penstock.ipc.client import EngineState
from penstock.ipc.kv_memory import KvMemory
from penstock.ipc.launchers import Launcher, SpawnLauncher
from penstock.ipc.process import EngineProcess
from penstock.ipc.request_client import SingleEngineClient
from penstock.ipc.restoring import EngineChanges
from penstock.ipc.standby import Standby
from penstock.types import Event, Hello, Stats, WeightState
from penstock.types.messages import Control, DescribeWeights, Sleep, UnregisterAdapter

log = logging.getLogger(__name__)

PAUSES = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each restart, while engines die early
EARLY = 10.0  # seconds: an engine that dies within them has died early
SPAWNING = SpawnLauncher()
GRACE = 5.0  # seconds that an engine has to exit by itself


class ProcessClient(SingleEngineClient):
    """Restarts the engine process when it dies, after `pauses` that grow while engines die early. Requests wait for the
    next one until the last of the pauses was of no use. From then on they are refused, and the engine is tried again
    with that pause; without pauses, never."""

    def __init__(self, config: Config, launcher: Launcher = SPAWNING, pauses: Sequence[float] = PAUSES) -> None:
        super().__init__()
        self._config = config
        self._launcher = launcher
        self._pauses = pauses
        self._failures = 0  # engines that died early or did not start, in a row
        self._engine: EngineProcess | None = None
        self._flight = FlightRecord()  # the last lost engine's record
        self._kv = KvMemory()
        self._standby = Standby(launcher)
        self._launched = config  # the last engine was, with this
        self._keeper: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None  # about the last death
        self._unrestored: WeightState | None = None  # the weights and the pause of an engine that was lost

    async def start(self, *, yielding: bool = False) -> Hello:
        """Starts the engine; raises what keeps it from starting. Starting twice changes nothing."""
        if self._keeper is None:
            try:
                await self._launch(yielding)
            except BaseException:
                self._kv.close()
                raise
            self.state = EngineState.READY
            self._keeper = asyncio.create_task(self._keep_running())
        if self.hello is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self.hello

    async def close(self) -> None:
        for task in (self._keeper, self._restoring):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._writing is not None:
            await self._writing
        engine, self._engine = self._engine, None
        self.refuse("the engine is closed")
        if engine is not None:
            await engine.end(GRACE)
        await self._standby.close()
        self._kv.close()

    async def _ask(self, message: Control[Any]) -> Event:
        if isinstance(message, Sleep):
            await self._standby.close()
        return await super()._ask(message)

    def _remember(self, message: Control[Any], answer: Event) -> None:
        super()._remember(message, answer)
        if isinstance(message, UnregisterAdapter):  # an engine that is started again must not load the adapter
            kept = tuple(text for text in self._config.adapter if parse_adapter(text).name != message.name)
            self._config = replace(self._config, adapter=kept)

    def _reachable(self) -> EngineProcess:
        if self._engine is None:
            raise EngineUnavailable(self.unavailable_reason)
        return self._engine

    def _present(self) -> EngineProcess | None:
        return None if self.state is EngineState.RESUMING else self._reachable()

    def _take(self, step: wire.Step) -> None:
        self.stats = step.stats
        if self._engine is not None:
            self._streams.deliver(self._engine, step.events())

    async def _launch(self, yielding: bool = False) -> None:
        if self._failures > 1 or self._streams.judge.blamed_twice:  # the KV cache may be the cause
            await self._standby.close()
            self._kv.close()
        config = replace(self._config, yielding=yielding, grammars_wait=self._streams.with_grammars)
        config = replace(config, kv_file=self._kv.open(), descriptors=self._kv.open_descriptors())
        times, self._launched = self._flight.times, config
        standby = await self._standby.take(config, times)
        self._engine = standby or await EngineProcess.launch(self._launcher, config, times)
        self.hello = self._engine.hello
        self._settings.adapters = {info.name: info for info in self.hello.adapters} | self._settings.adapters

    # -- when it dies --------------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        while self._engine is not None:
            engine, started = self._engine, time.monotonic()
            ending = await engine.read(self._take)
            if time.monotonic() - started > EARLY or self.stats.generated_tokens:
                self._failures = 0
            reason = f"the engine process {engine.hello.pid} {ending}"
            detail = {"detail": engine.last_stack()}
            log.error("%s; %d requests wait for a new one", reason, len(self._streams), extra=detail)
            await self._lose(engine, reason)
            await self._restart(reason)

    async def _lose(self, engine: EngineProcess, reason: str) -> None:
        """Keeps the requests in flight for the next engine."""
        self._engine, self.stats, self.state = None, Stats(), EngineState.RESUMING
        self.unavailable_reason = f"{reason}; a new one is being started: send this again"
        self._unrestored, self._settings.weights = self._unrestored or self.weights, WeightState()
        if self._restoring is not None:
            self._restoring.cancel()
        self._flight = engine.last_flight()
        if self._config.post_mortem != OFF:
            self._writing = asyncio.create_task(
                asyncio.to_thread(
                    post_mortem.write_about,
                    self._config,
                    engine.hello,
                    reason,
                    engine.last_stack(),
                    self._flight,
                    self._streams.requests,
                )
            )
        lost = self._streams.lose(engine, reason)
        if engine.innocent:
            self._streams.judge.clear(lost)
        else:
            self._streams.judge.blame(lost, self._flight.suspects, crashed=engine.crashed)
        await engine.end(GRACE)

    async def _restart(self, reason: str) -> None:
        """Starts the next engine, however long that takes. Without pauses, there is none."""
        while self._pauses:
            await asyncio.sleep(self._pauses[min(self._failures, len(self._pauses) - 1)])
            self._failures += 1
            try:
                await self._launch()
            except PenstockError as error:
                reason = str(error)
                log.error("the engine could not be restarted: %s", reason)
            else:
                self.restarts += 1
                log.warning("a new engine process runs; %d requests go on", len(self._streams))
                return self._resume()
            if self._failures >= len(self._pauses):
                again = f"it is tried again every {self._pauses[-1]:g} s"
                self.refuse(f"the engine failed {self._failures + 1} times in a row, {again}: {reason}")
                log.error("%s", self.unavailable_reason)
        self.refuse(f"{reason}, and is given up")

    def refuse(self, reason: str) -> None:
        self.stats = Stats()
        super().refuse(reason)

    # -- when the next one has started ---------------------------------------------------------------------------

    def _resume(self) -> None:
        assert self.hello is not None
        if changes := self._settings.missing(self.hello, self._unrestored or WeightState()):
            self._restoring = asyncio.create_task(self._restore(changes))
        else:
            self._restored()

    async def _restore(self, changes: EngineChanges) -> None:
        try:
            await changes.tell(self._ask)
            await self.ask(DescribeWeights())
        except EngineUnavailable:
            return  # it has died meanwhile
        except PenstockError as error:
            log.error("the engine that was started is not as the one before: %s", error)
        self._restored()

    def _restored(self) -> None:
        """Resumes the requests. An engine without any may sleep as the one before did."""
        self._unrestored = None
        self.state = EngineState.READY
        if self._settings.asleep and not len(self._streams) and self.hello is not None and self.hello.can_sleep:
            self.tell(Sleep(id=self.next_id()))
        self._streams.dispatcher.resume()
        if self.hello is not None and self.hello.can_stand_by and not (self._settings.asleep or self._config.listen):
            config = replace(self._launched, grammars_wait=self._streams.with_grammars)
            self._standby.prepare(config, self.hello.pid, loads_late=self.hello.loads_late)

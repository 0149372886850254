"""Keeps an engine process ready to take over from one that is lost: it has loaded its model and waits."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from math import inf
from pathlib import Path

from penstock.config import Config, available_memory
from penstock.errors import PenstockError
from penstock.ipc.launchers import Launcher
from penstock.ipc.process import EngineProcess

log = logging.getLogger(__name__)

PAUSE = 0.3  # seconds until another standby is started: the one that has just taken over goes first
LONG_PAUSE = 2.0  # seconds until the first is started: the engine may still be loading the vocabulary for grammars
TAKE_SECONDS = 5.0  # in which it could run, that a standby has to take over
SHARE = 4  # a standby may take one part in so many of the memory that is left


class Standby:
    """Keeps at most one process ready. Weights and KV cache are mapped from the same files as the engine's."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._config: Config | None = None
        self._starting: asyncio.Task[EngineProcess] | None = None
        self._spawning = False  # a process is being started
        self._pause = LONG_PAUSE
        self._most = TAKE_SECONDS  # limit for a takeover

    def prepare(self, config: Config, pid: int, *, loads_late: bool = False) -> None:
        """Begins to start a process that can take over from the engine process `pid` with this config, if memory
        allows. There is none yet. If it `loads_late`, taking over takes as long as that gets on."""
        if _fits(pid):
            self._most = inf if loads_late else TAKE_SECONDS
            self._config, self._spawning = replace(config, standby=True), False
            self._starting = asyncio.create_task(self._start(self._config))

    async def _start(self, config: Config) -> EngineProcess:
        await asyncio.sleep(self._pause)
        self._spawning = True
        return await EngineProcess.spawn(self._launcher, config)

    async def take(self, config: Config, times: tuple[int, ...]) -> EngineProcess | None:
        """Returns an engine that has taken over with this config; None if there is none that could. `times` are those
        of the flight record of the engine before."""
        ready = self._config is not None and replace(self._config, grammars_wait=config.grammars_wait, standby=False)
        engine = await self._take_started() if ready == config else None
        await self.close()
        self._pause = PAUSE if engine is not None else LONG_PAUSE
        if engine is None:
            return None
        try:
            engine.take_over()
            await engine.open(times, self._most)
        except PenstockError as error:
            log.error("the standby could not take over, and another engine is started: %s", error)
            return None
        return engine

    async def close(self) -> None:
        if (engine := await self._take_started()) is not None:
            await engine.end(grace=0)

    async def _take_started(self) -> EngineProcess | None:
        """Returns the process that was started, which the caller now owns. If none is yet, none will be."""
        starting, self._starting, self._config = self._starting, None, None
        if starting is None:
            return None
        if not self._spawning:
            starting.cancel()
        try:
            await asyncio.wait({starting})
        except asyncio.CancelledError:
            self._starting = starting  # the caller has ended, and somebody still has to end the process
            raise
        try:
            return starting.result()
        except (asyncio.CancelledError, PenstockError):
            return None


def _fits(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # it has ended, or this system has no such files
    private = sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))
    return private * SHARE < available_memory()

"""Fleets of real engine processes over the fake backend, kept by the test itself, for a gateway's engine client."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from penstock.config import Config
from penstock.fleet.client import FleetClient
from penstock.fleet.directory import Death, Directory, ReplicaInfo, ReplicaState
from penstock.ipc.process import EngineProcess
from tests.fleet.fake_host import LIMITS, POISON, VOCAB, FakeLauncher

SECRET = "of the test"
FAKE = FakeLauncher()

# The same engine as a program, whose text a test can change.
HOST = f"""
import ctypes, time
from penstock.backend.fake import FakeBackend
from penstock.engine.assemble import assemble
from penstock.ipc.host import host
from penstock.types import Limits

class Mortal(FakeBackend):
    def launch(self, batch):
        for token, at in zip(batch.tokens.tolist(), batch.positions.tolist()):
            if token == {POISON} and at < 4:
                ctypes.string_at(0)
        return super().launch(batch)

    def wait(self, ticket):
        time.sleep(0.002)
        return super().wait(ticket)

def open(config, _):
    backend = Mortal({VOCAB})
    limits = Limits{tuple(LIMITS)}
    if config.model == "other":
        limits = limits._replace(block_size=32)
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    return assemble(backend, limits, sleeper=backend.sleeper, block_events=bool(config.listen))

host(open)
"""


class Keepers:
    """Starts engines, says who they are, and starts those again that die: what a steward and its keepers do."""

    secret = SECRET

    def __init__(
        self, count: int, launcher: Any = FAKE, models: Sequence[str] = (), restart: bool = True, name: str = "fake"
    ) -> None:
        self._launcher = launcher
        self._name = name
        self._models = models or ("fake",) * count
        self._restart = restart
        self.engines: dict[str, EngineProcess] = {}
        self._infos: dict[str, ReplicaInfo] = {}
        self._deaths: list[Death] = []
        self._ended: set[str] = set()
        self._gone: set[str] = set()  # for good
        self._version = 0
        self._changed = asyncio.Event()  # another one after each change
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Directory:
        names = [f"fake-{number}" for number in range(len(self._models))]
        await asyncio.gather(*(self._launch(*each) for each in zip(names, self._models, strict=True)))
        return self._directory()

    async def changes(self) -> AsyncIterator[Directory]:
        told = -1
        while True:
            while told == self._version:
                await self._changed.wait()
            told = self._version
            yield self._directory()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(engine.end(5) for name, engine in self.engines.items() if name not in self._ended))

    def kill(self, name: str, kind: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.engines[name].hello.pid, kind)

    def tell(self, name: str, **changed: Any) -> None:
        """Tells the gateway something else about a replica."""
        self._infos[name] = self._infos[name]._replace(**changed)
        self._change()

    def drain(self, name: str) -> None:
        self.tell(name, state=ReplicaState.DRAINING)

    async def replace(self, old: str, new: str) -> None:
        """Ends a replica and starts another one, under another name."""
        self.drain(old)
        await self._launch(new, self._models[0])
        engine = self.engines.pop(old)
        self._gone.add(old)
        await engine.end(5)
        del self._infos[old]
        self._change()

    async def _launch(self, name: str, model: str) -> None:
        config = Config(model=model, name=self._name, post_mortem="off", listen="ipc://*", secret=SECRET)
        engine = self.engines[name] = await EngineProcess.launch(self._launcher, config)
        self._ended.discard(name)
        hello = engine.hello
        self._infos[name] = ReplicaInfo(name, hello.address, hello.pid, hello.epoch, ReplicaState.READY)
        self._change()
        self._tasks.append(asyncio.create_task(self._keep(name, model, engine)))

    async def _keep(self, name: str, model: str, engine: EngineProcess) -> None:
        await engine.read(lambda _: None)
        if name in self._gone:
            return
        self._deaths.append(Death(name, engine.hello.epoch, engine.crashed, await engine.last_suspects()))
        state = ReplicaState.STARTING if self._restart else ReplicaState.ENDED
        self.tell(name, state=state, address="", reason="it has died")
        self._ended.add(name)
        await engine.end(0)
        if self._restart:
            await self._launch(name, model)

    def _directory(self) -> Directory:
        return Directory(self._version, tuple(self._infos.values()), tuple(self._deaths))

    def _change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


@asynccontextmanager
async def fleet(count: int, **options: Any) -> AsyncIterator[tuple[FleetClient, Keepers]]:
    """Yields a client of so many engines once all have joined, and who keeps them."""
    keepers = Keepers(count, **options)
    client = FleetClient(keepers, name="gateway")
    await client.start()
    try:
        yield client, keepers
    finally:
        await client.close()


async def until_ready(client: FleetClient, count: int) -> None:
    while sum(info.state is ReplicaState.READY for info in client.replicas) < count:
        await asyncio.sleep(0.005)

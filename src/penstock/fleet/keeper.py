"""Keeps one replica running: starts its engine, restarts it when it dies, and reports to the steward.

A keeper is a process of its own. Without a steward it continues as before, and reports to the next one. When it ends
unasked, its engine continues as long as gateways use it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import replace

import msgspec
import zmq
import zmq.asyncio

from penstock.config import OFF
from penstock.engine.flight_recorder import FlightRecord
from penstock.errors import PenstockError
from penstock.fleet.directory import Death, ReplicaInfo, ReplicaState
from penstock.fleet.forks import RemoteForkLauncher
from penstock.fleet.ground import own_address
from penstock.fleet.steward_wire import (
    KeeperOrder,
    KeeperReport,
    KeeperSpec,
    StartFailure,
    WrongProtocol,
    decode_from_steward,
    encode,
)
from penstock.ipc import post_mortem, wire
from penstock.ipc.kv_memory import KvMemory
from penstock.ipc.launchers import Launcher, SpawnLauncher
from penstock.ipc.process import EngineProcess
from penstock.ipc.spawn import EARLY, GRACE, PAUSES

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0  # between two reports
PATIENCE = 120.0  # seconds without a steward after which a keeper leaves its engine to itself
REMEMBERED = 8  # deaths that a report tells of
SAID = 0.2  # seconds that the last report has to arrive


class Keeper:
    """Runs one engine process after another, until the steward ends it."""

    def __init__(self, spec: KeeperSpec, launcher: Launcher) -> None:
        self._spec = spec
        self._launcher = launcher
        self._info = ReplicaInfo(spec.name, host=socket.gethostname())
        self._engine: EngineProcess | None = None
        self._flight = FlightRecord()
        self._kv = KvMemory()
        self._failures = 0  # engines that died early or did not start, in a row
        self._attempts = 0  # in vain, since an engine was ready
        self._failure: StartFailure | None = None
        self._restarts = -1
        self._in_flight = 0
        self._deaths: tuple[Death, ...] = ()
        self._told_to_end = asyncio.Event()
        context = zmq.asyncio.Context()
        self._context = context
        self._steward: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self._steward.setsockopt(zmq.IMMEDIATE, 1)  # a report is for the steward that there is now
        self._steward.setsockopt(zmq.SNDHWM, 8)

    async def run(self) -> None:
        self._steward.connect(self._spec.steward)
        others = [asyncio.create_task(self._report_again_and_again()), asyncio.create_task(self._listen())]
        keeping = asyncio.create_task(self._keep_running())
        ending = asyncio.create_task(self._told_to_end.wait())
        await asyncio.wait({keeping, ending, others[1]}, return_when=asyncio.FIRST_COMPLETED)
        for task in (keeping, ending, *others):
            task.cancel()
        await asyncio.wait({keeping, *others})
        if not keeping.cancelled() and (bug := keeping.exception()):
            raise bug
        if self._told_to_end.is_set():
            await self._end()
        self._context.destroy(linger=int(SAID * 1000))

    async def _end(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.end(GRACE)
        self._kv.close()
        self._change(state=ReplicaState.ENDED, address="", pid=0, reason="it was told to end")

    # -- the engine --------------------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        while True:
            await asyncio.sleep(PAUSES[min(self._failures, len(PAUSES) - 1)])
            self._failures += 1
            try:
                await self._launch()
            except PenstockError as error:
                self._attempts += 1
                self._failure = StartFailure(error.code, error.message)
                log.error("%s could not be started: %s", self._spec.name, error)
                self._change(reason=str(error))
                continue
            engine, started = self._engine, time.monotonic()
            assert engine is not None
            ending = await engine.read(self._take)
            if time.monotonic() - started > EARLY:
                self._failures = 0
            await self._lose(engine, f"the engine process {engine.hello.pid} {ending}")

    async def _launch(self) -> None:
        if self._failures > 2:  # the KV cache may be the cause
            self._kv.close()
        listen = f"tcp://{own_address(_host_in(self._spec.steward))}:*" if self._spec.tcp else "ipc://*"
        config = replace(self._spec.config, listen=listen, secret=self._spec.secret)
        config = replace(config, kv_file=self._kv.open(), descriptors=self._kv.open_descriptors())
        self._engine = await EngineProcess.launch(self._launcher, config, self._flight.times)
        hello = self._engine.hello
        self._restarts += 1
        self._attempts, self._failure = 0, None
        self._change(address=hello.address, pid=hello.pid, epoch=hello.epoch, state=ReplicaState.READY, reason="")

    def _take(self, step: wire.Step) -> None:
        if step.stats.generated_tokens:
            self._failures = 0
        before, self._in_flight = self._in_flight, step.stats.running + step.stats.waiting
        if before and not self._in_flight:
            self._report()

    async def _lose(self, engine: EngineProcess, reason: str) -> None:
        """Tells whom the engine was working on, so that gateways know whom to doubt."""
        detail = {"detail": engine.last_stack()}
        log.error("%s: %s; a new one is being started", self._spec.name, reason, extra=detail)
        self._engine, self._in_flight, self._flight = None, 0, engine.last_flight()
        try:
            suspects = () if engine.innocent else await engine.last_suspects()
            death = Death(self._spec.name, engine.hello.epoch, engine.crashed, suspects)
            self._deaths = (*self._deaths, death)[-REMEMBERED:]
            self._change(address="", pid=0, state=ReplicaState.STARTING, reason=reason)
            if self._spec.config.post_mortem != OFF:
                await asyncio.to_thread(
                    post_mortem.write_about,
                    self._spec.config,
                    engine.hello,
                    reason,
                    engine.last_stack(),
                    self._flight,
                    engine.last_requests(),
                )
        finally:
            await engine.end(GRACE)  # also if this keeper is told to end meanwhile: its folder would stay

    # -- the steward -------------------------------------------------------------------------------------------------

    def _change(self, **fields: object) -> None:
        self._info = self._info._replace(**fields)  # type: ignore[arg-type]
        self._report()

    def _report(self) -> None:
        report = KeeperReport(
            self._spec.secret,
            self._info,
            os.getpid(),
            self._spec.revision,
            self._in_flight,
            max(self._restarts, 0),
            self._attempts,
            self._failure,
            self._deaths,
        )
        sending = asyncio.ensure_future(self._steward.send_multipart(encode(report, self._spec.name), zmq.NOBLOCK))
        sending.add_done_callback(lambda sent: sent.exception())  # there may be no steward now

    async def _report_again_and_again(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(BEAT_SECONDS)

    async def _listen(self) -> None:
        """Reads the steward's orders; returns after PATIENCE without any. A steward of another version counts as none;
        if it has started this keeper, the keeper ends."""
        silent, known = 0.0, False
        while silent < PATIENCE:
            if not await self._steward.poll(int(BEAT_SECONDS * 1000)):
                silent += BEAT_SECONDS  # what counts is the time that this process was awake
                continue
            try:
                order = decode_from_steward(await self._steward.recv_multipart())
            except WrongProtocol as error:
                if not known:
                    log.error("%s ends: %s", self._spec.name, error)
                    return self._told_to_end.set()
                silent += BEAT_SECONDS  # another one has taken the place of the steward that knew this keeper
                continue
            silent, known = 0.0, True
            if isinstance(order, KeeperOrder) and order.end:
                self._told_to_end.set()
        log.error(
            "%s has heard of no steward for %.0f s and leaves its engine to the gateways", self._spec.name, silent
        )


def keep(spec: bytes) -> None:
    for ending in (signal.SIGINT, signal.SIGTERM):  # a terminal or a service manager may send one to every process
        signal.signal(ending, signal.SIG_IGN)  # the steward decides when to stop
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    asyncio.run(_keep(msgspec.json.decode(spec, type=KeeperSpec)))


async def _keep(spec: KeeperSpec) -> None:
    if spec.host_command:
        return await Keeper(spec, SpawnLauncher(spec.host_command)).run()
    await Keeper(spec, RemoteForkLauncher(spec.forks)).run()


def _host_in(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0]


if __name__ == "__main__":
    keep(sys.stdin.buffer.readline())

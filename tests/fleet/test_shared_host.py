"""The host that several clients share: who may join, what becomes of clients that fall silent, and of a host whose
keeper has died."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from penstock.backend.fake import continuation
from penstock.config import Config
from penstock.core.hashing import SIZE
from penstock.fleet.client import FleetClient
from penstock.fleet.directory import Directory, ReplicaInfo, ReplicaState
from penstock.fleet.holders import DEVICE
from penstock.ipc import shared_wire, wire
from penstock.ipc.process import EngineProcess
from penstock.ipc.shared_host import SharedClient
from penstock.ipc.shared_wire import AskSnapshot, Beat, Farewell, Join, Joined, Leave, Snapshot
from penstock.types import Failed, Finished, Request, SamplingParams, Stats, Tokens
from penstock.types.messages import Abort, Add, Close, DescribeWeights, FlushCache, ListAdapters
from tests.engine.test_ipc import run
from tests.fleet.fake_host import VOCAB, FakeLauncher
from tests.fleet.fleets import FAKE, SECRET, fleet, until_ready
from tests.fleet.test_client import answer, check, until

HASTY = FakeLauncher(TICK=0.1, SILENT=0.5)
CONFIG = Config(model="fake", name="fake", post_mortem="off", listen="ipc://*", secret=SECRET)


class Peer:
    """Speaks the protocol by hand."""

    def __init__(self, context: Any, address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(address)

    async def join(self, name: str = "peer", secret: str = SECRET, **more: int) -> Any:
        await self._socket.send_multipart(shared_wire.encode_link(Join(secret, name, **more)))
        return await self.hear()

    async def tell(self, message: Any) -> None:
        await self._socket.send_multipart(shared_wire.encode_link(message))

    async def send(self, message: Any) -> None:
        await self._socket.send(wire.encode_message(message))

    async def send_raw(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    async def hear(self) -> Any:
        return shared_wire.decode_link_answer(await asyncio.wait_for(self._socket.recv(), 20))

    async def until(self, kind: type, met: Any = lambda _: True) -> Any:
        while True:
            heard = await self.hear()
            if isinstance(heard, kind) and met(heard):
                return heard


@asynccontextmanager
async def hosted(launcher: FakeLauncher = FAKE) -> AsyncIterator[tuple[EngineProcess, Any]]:
    engine = await EngineProcess.launch(launcher, CONFIG)
    reading = asyncio.create_task(engine.read(lambda _: None))
    context = zmq.asyncio.Context()
    try:
        yield engine, lambda: Peer(context, engine.hello.address)
    finally:
        await engine.end(5)
        await reading
        context.destroy(linger=0)


def request(id: int, prompt: tuple[int, ...], count: int) -> Request:
    return Request(id, prompt, SamplingParams(), count)


def test_clients_that_fall_silent_or_join_again_lose_what_they_had() -> None:
    async def scenario() -> None:
        async with hosted(HASTY) as (engine, peer):
            silent, watcher = peer(), peer()
            joined = await silent.join("silent")
            assert isinstance(joined, Joined)
            assert joined.hello.epoch == engine.hello.epoch
            assert isinstance(await silent.hear(), Snapshot)
            await watcher.join("watcher")
            await silent.send(Add(request(7, (1, 2), 4000)))
            step = await silent.until(wire.Step, lambda step: step.tokens)
            assert (step.tokens[0].seq, step.received) == (7, 1)
            beating = asyncio.create_task(_beat(watcher))
            await watcher.until(wire.Step, lambda step: step.stats.running == 1)
            await watcher.until(wire.Step, lambda step: step.stats.running == 0)  # it has beaten, the other has not
            await silent.tell(Beat())
            assert (await silent.until(wire.Refused)).code == shared_wire.NOT_JOINED

            again, newer = peer(), peer()
            await again.join("same")
            await again.send(Add(request(1, (1, 2), 4000)))
            await watcher.until(wire.Step, lambda step: step.stats.running == 1)
            await newer.join("same")
            await watcher.until(wire.Step, lambda step: step.stats.running == 0)
            await newer.send(Add(request(1, (3, 4), 5)))
            said: list[int] = []
            while len(said) < 5:
                said += [token for tokens in (await newer.until(wire.Step)).tokens for token in tokens.tokens]
            assert said == continuation([3, 4], 5, VOCAB)
            beating.cancel()

    run(scenario())


async def _beat(peer: Peer) -> None:
    while True:
        await peer.tell(Beat())
        await asyncio.sleep(0.1)


def test_a_client_is_told_which_of_its_own_requests_compute_their_prompts() -> None:
    first, second = SharedClient(b"a", "first", 1), SharedClient(b"b", "second", 2)
    stats = Stats(running=3, prefilling=(first.engine_id(7), second.engine_id(7), second.engine_id(8)))
    assert first.own(stats) == stats._replace(prefilling=(7,))
    assert second.own(stats) == stats._replace(prefilling=(7, 8))
    assert first.own(Stats(running=3)) == Stats(running=3)


def test_what_a_client_sends_harms_itself_alone() -> None:
    async def scenario() -> None:
        async with hosted() as (engine, peer):
            good = peer()
            await good.join("good")
            for frames in ((b"junk",), (b"", b"junk"), (b"",), (b"", b"", b""), (b"\x93\x01\x02\x03",)):
                bad = peer()
                await bad.send_raw(*frames)
                assert (await bad.until(wire.Refused)).code in (shared_wire.MALFORMED, shared_wire.NOT_JOINED)
                await bad.join("bad")
                await bad.send(Add(request(1, (1, 2), 4000)))
                await good.until(wire.Step, lambda step: step.stats.running == 1)
                await bad.send_raw(*frames)
                assert (await bad.until(wire.Refused)).code == shared_wire.MALFORMED
                await good.until(wire.Step, lambda step: step.stats.running == 0)
            closer = peer()
            await closer.join("closer")
            await closer.send(Close())  # is for its keeper to say
            await good.send(ListAdapters(id=3))
            step = await good.until(wire.Step, lambda step: step.failed)
            assert step.failed == [Failed(3, "not_supported", "this engine has no adapters")]
            await good.send(FlushCache())
            await good.send(Abort(99))
            await good.tell(AskSnapshot())
            assert (await good.until(Snapshot)).blocks.epoch == engine.hello.epoch
            await good.tell(Leave())

    run(scenario())


def test_an_engine_that_ends_says_farewell_and_a_dead_one_says_whom_it_worked_on() -> None:
    async def scenario() -> None:
        async with hosted() as (engine, peer):
            client = peer()
            await client.join("someone")
            await client.send(Add(request(12, (1, 2), 4000)))
            await client.until(wire.Step, lambda step: step.tokens)
            os.kill(engine.hello.pid, signal.SIGKILL)
            await until(lambda: engine._exit.done())
            assert await engine.last_suspects() in ((("someone", 12),), ())  # () between two steps
        async with hosted() as (engine, peer):
            client = peer()
            await client.join("someone")
            engine.send(Close())
            assert isinstance(await client.until(Farewell), Farewell)

    run(scenario())


KEEPER = '''
import asyncio, sys
from penstock.config import Config
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.process import EngineProcess
from penstock.ipc.shared_host import SharedClient

HOST = """
from penstock.ipc import shared_host
from penstock.ipc.host import host
from tests.fleet.fake_host import open_fake
shared_host.TICK, shared_host.ABANDONED = 0.1, 0.5
host(open_fake)
"""

async def main():
    config = Config(model="fake", name="fake", post_mortem="off", listen="ipc://*", secret=sys.argv[1])
    engine = await EngineProcess.launch(SpawnLauncher((sys.executable, "-c", HOST)), config)
    print(engine.hello.address, engine.hello.pid, engine.hello.epoch, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
'''


class Known:
    """Tells of one replica, and of nothing else."""

    secret = SECRET

    def __init__(self, address: str, pid: int, epoch: int) -> None:
        self._info = ReplicaInfo("fake-0", address, pid, epoch, ReplicaState.READY)

    async def start(self) -> Directory:
        return Directory(1, (self._info,))

    async def changes(self) -> AsyncIterator[Directory]:
        await asyncio.Event().wait()
        yield Directory(1, ())

    async def close(self) -> None: ...


def test_an_engine_whose_keeper_has_died_goes_on_until_nobody_needs_it() -> None:
    async def scenario() -> None:
        keeper = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KEEPER, SECRET, stdout=asyncio.subprocess.PIPE
        )
        assert keeper.stdout is not None
        address, pid, epoch = (await keeper.stdout.readline()).decode().split()
        client = FleetClient(Known(address, int(pid), int(epoch)))
        await client.start()
        asked = asyncio.create_task(answer(client, [1, 2], 300))
        await until(lambda: client.stats.running == 1)
        keeper.kill()
        await keeper.wait()
        check(await asked, [1, 2], 300)
        check(await answer(client, [3]), [3])
        await client.close()
        folder = os.path.dirname(address.removeprefix("ipc://"))
        await until(lambda: not os.path.exists(folder))  # it has ended by itself
        await until(lambda: not os.path.exists(f"/proc/{pid}"))

    run(scenario())


def test_the_index_is_what_a_full_scan_finds() -> None:
    async def scenario() -> None:
        async with fleet(1, models=("small",)) as (client, _):
            await until_ready(client, 1)
            prompts = [[number % 7, *range(number % 50, number % 50 + 60)] for number in range(120)]
            answers = await asyncio.gather(*(answer(client, prompt, 20) for prompt in prompts))
            for events, prompt in zip(answers, prompts, strict=True):
                check(events, prompt, 20)
            await client.ask(DescribeWeights())
            view, told = client._router.view, []
            assert view is not None
            followed = view._index.held_by(0)
            client._lifecycle.take_snapshot = lambda _, snapshot: told.append(snapshot)  # type: ignore[method-assign]
            (replica,) = client._members.ready()
            replica.ask_snapshot()
            await until(lambda: told)
            held = told[0].blocks.hashes
            assert {(DEVICE, held[at : at + SIZE]) for at in range(0, len(held), SIZE)} == followed
            assert 0 < len(followed) <= 64

    run(scenario())


def test_a_gap_in_the_events_is_closed_by_a_snapshot() -> None:
    async def scenario() -> None:
        async with fleet(1) as (client, _):
            assert client._router.view is not None
            prefix = list(range(64))
            await answer(client, [*prefix, 1])
            index = client._router.view._index
            index._feeds[0].next -= 1_000_000  # as if so many events were missing
            await answer(client, [*range(100, 170)])
            await until(lambda: index.is_live(0))
            events = await answer(client, [*prefix, 2])
            assert isinstance(events[0], Tokens)
            assert isinstance(events[-1], Finished)
            assert events[0].cached == 64
            assert len(index.held_by(0)) > 4

    run(scenario())

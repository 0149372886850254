"""A part of a fleet that is of another version is told so, by both numbers, and the rest goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from penstock.errors import PenstockError
from penstock.fleet import keeper as keeping
from penstock.fleet import steward_wire
from penstock.fleet.directory import ReplicaInfo, ReplicaState
from penstock.fleet.keeper import Keeper
from penstock.fleet.roster import Roster
from penstock.fleet.steward import Steward
from penstock.fleet.steward_link import StewardLink, ask
from penstock.fleet.steward_wire import (
    AskStatus,
    CommandRefused,
    FleetStatus,
    KeeperOrder,
    KeeperReport,
    KeeperSpec,
    StartFailure,
    WrongProtocol,
    decode_from_steward,
    encode,
)
from tests.fleet.test_steward import PATIENCE, SECRET, folder, spec_of

__all__ = ["folder"]
OLDER, NEWER = 0, 2


class NoGround:
    async def start(self, keeper: KeeperSpec) -> None: ...

    async def forget(self, name: str) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def steward_at(folder: Path) -> AsyncIterator[tuple[Steward, zmq.asyncio.Socket]]:
    """Yields a steward that starts nothing, and a socket that is connected with it."""
    spec, context = spec_of(folder, 1), zmq.asyncio.Context()
    steward = Steward(spec, lambda *_: NoGround())
    running = asyncio.create_task(steward.run())
    peer = context.socket(zmq.DEALER)
    peer.connect(spec.address)
    try:
        async with asyncio.timeout(PATIENCE):
            yield steward, peer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        context.destroy(linger=0)


def framed(protocol: int, sender: str, message: Any) -> tuple[bytes, bytes]:
    return f"{protocol} {sender}".encode(), encode(message, "")[1]


@pytest.mark.parametrize("protocol", [OLDER, NEWER])
def test_a_steward_refuses_other_versions_and_serves_its_own(
    folder: Path, protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with steward_at(folder) as (_, peer):
            for _ in range(3):
                await peer.send_multipart(framed(protocol, "other-gateway", AskStatus(SECRET)))
                refused = decode_from_steward(await peer.recv_multipart())
                assert isinstance(refused, CommandRefused)
                assert refused.code == "wrong_protocol"
                assert f"other-gateway speaks protocol {protocol} of fleets and this process 1" in refused.message
                assert "start a new fleet" in refused.message
            for nonsense in ((b"hello",), (b"1 x", b"\xc1"), (b"x", b"y"), (b"", b"", b""), (b"9" * 9999, b"")):
                await peer.send_multipart(nonsense)
            await peer.send_multipart(encode(AskStatus("another"), "x"))
            refused = decode_from_steward(await peer.recv_multipart())
            assert isinstance(refused, CommandRefused)
            assert refused.code == "wrong_secret"
            await peer.send_multipart(encode(AskStatus(SECRET), "x"))
            status = decode_from_steward(await peer.recv_multipart())
            assert isinstance(status, FleetStatus)
            assert status.refused == 3 + 5 + 1

    asyncio.run(main())
    assert caplog.text.count("other-gateway speaks protocol") == 1


def test_an_upgrade_to_another_version_of_the_protocol_is_taken_back() -> None:
    roster = Roster("m", 1)
    ready = ReplicaInfo("m-0", "ipc://x", 1, 1, ReplicaState.READY)
    roster.take(KeeperReport(SECRET, ready, 2, 0), 0.0)
    roster.revision = 1
    assert roster.plan(0.1, 30.0, 2**62).start == ("m-1",)
    why = StartFailure("wrong_protocol", "another version")
    roster.refuse("m-0", why)  # one that has reported is not doubted for what somebody says in its name
    roster.refuse("nobody", why)
    assert roster.hopeless_upgrade is None
    roster.refuse("m-1", why)
    assert roster.hopeless_upgrade == why


class OtherSteward:
    """Answers everything in another protocol, or in the one that `answers` says."""

    def __init__(self, spec: Any) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.bind(spec.address)
        self.protocol = NEWER
        self.heard = 0
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            route, *_ = await self.socket.recv_multipart()
            self.heard += 1
            await self.socket.send_multipart((route, *framed(self.protocol, "the steward", KeeperOrder(end=False))))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


def test_a_gateway_and_a_command_say_that_the_steward_is_of_another_version(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        spec = spec_of(folder, 1)
        other = OtherSteward(spec)
        link = StewardLink(spec)
        said = "the steward speaks protocol 2 of fleets and this process 1"
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(PenstockError, match=said) as raised:
                await link.start()
            assert raised.value.code == "wrong_protocol"
            with pytest.raises(WrongProtocol, match=said):
                await ask(spec, AskStatus(SECRET))
            await link.close()
        await other.close()

    asyncio.run(main())
    assert caplog.text.count("the steward speaks protocol 2") == 1


class NoEngine:
    async def launch(self, *_: object) -> Any:
        await asyncio.Event().wait()


def test_a_keeper_ends_if_it_was_started_by_another_version_and_else_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "BEAT_SECONDS", 0.02)

    async def main() -> None:
        spec = spec_of(folder, 1)
        other = OtherSteward(spec)
        about = KeeperSpec("toy-0", spec.address, SECRET, str(folder), "", spec.config, 0)
        async with asyncio.timeout(PATIENCE):
            await Keeper(about, NoEngine()).run()
        assert "toy-0 ends: the steward speaks protocol 2 of fleets and this process 1" in caplog.text

        other.protocol = steward_wire.PROTOCOL
        keeper = Keeper(msgspec.structs.replace(about, name="toy-1"), NoEngine())
        running = asyncio.create_task(keeper.run())
        async with asyncio.timeout(PATIENCE):
            for protocol in (steward_wire.PROTOCOL, NEWER):
                other.protocol, before = protocol, other.heard
                while other.heard < before + 5:
                    await asyncio.sleep(0.01)
        assert not running.done()
        assert "toy-1 ends" not in caplog.text
        keeper._told_to_end.set()
        await running
        await other.close()

    asyncio.run(main())

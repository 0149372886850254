"""The bundle about an engine of a fleet has the requests of all gateways, and can be replayed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from penstock.cli.framework.command import Exit
from penstock.cli.replay import replay
from penstock.config import Config
from penstock.fleet.keeper import Keeper
from penstock.fleet.steward_wire import KeeperSpec
from penstock.ipc import post_mortem, spawn, wire
from penstock.ipc.flight_requests import REQUESTS_BYTES, SLOT_BYTES, SLOTS, FlightRequests, read_requests
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.process import EngineProcess
from penstock.ipc.shared_wire import ID_BITS
from penstock.ipc.spawn import ProcessClient
from penstock.types import BlockOffer, Request, SamplingParams
from penstock.types.messages import Abort, Add, Prefill
from tests.fleet.fake_host import POISON, VOCAB
from tests.fleet.fleets import FAKE, SECRET
from tests.fleet.test_shared_host import Peer, request

ASKED = Request(5, (901, 902, 903), SamplingParams(temperature=0.5, stop=("secret",)), 6, generated=(904,))


async def die(config: Config, folder: Path) -> None:
    """Has a keeper's engine die of a request while two gateways have others there."""
    engine = await EngineProcess.launch(FAKE, replace(config, listen="ipc://*", secret=SECRET, offers=("shm",)))
    reading = asyncio.create_task(engine.read(lambda _: None))
    context = zmq.asyncio.Context()
    one, two = Peer(context, engine.hello.address), Peer(context, engine.hello.address)
    for number, peer in enumerate((one, two), 1):
        await peer.join(f"gateway {number}")
        await peer.send(Add(request(1, (number, 2, 3), 5)))  # has ended by then
        await peer.until(wire.Step, lambda step: step.finished)
        await peer.send(Add(request(2, (number, 4, 5), 2000)))
        await peer.send(Add(request(3, (number, 6, 7), 2000)))
        await peer.send(Abort(3))
        await peer.until(wire.Step, lambda step: step.aborted)
    await two.send(Prefill(request(4, (1, 2, POISON), 50), id=9))
    ending = await reading
    context.destroy(linger=0)
    spec = KeeperSpec("toy-0", f"ipc://{folder}/steward", SECRET, str(folder), "", config, 0)
    keeper = Keeper(spec, SpawnLauncher())
    await keeper._lose(engine, f"the engine process {ending}")
    keeper._context.destroy(linger=0)


@pytest.mark.parametrize("kept", ["shapes", "tokens"])
def test_a_death_in_a_fleet_is_replayed(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    asyncio.run(asyncio.wait_for(die(Config(model="fake", post_mortem=kept), tmp_path), 60))
    (path,) = (tmp_path / "post-mortem").iterdir()
    bundle = post_mortem.read(path)
    assert "SIGSEGV" in bundle.reason
    described = {(each.id >> ID_BITS, each.id % 2**ID_BITS): each for each in bundle.requests}
    assert described.keys() == {(1, 2), (2, 2), (2, 9)}
    assert [each.suspect for each in described.values() if each.max_tokens == 1] == [True]
    assert all(each.prompt_tokens == 3 for each in described.values())
    config, requests = post_mortem.to_replay(bundle)
    assert not config.listen
    assert ((1, 2, POISON) in [each.prompt for each in requests]) == (kept == "tokens")

    monkeypatch.setattr(spawn, "ProcessClient", lambda config, pauses: ProcessClient(config, FAKE, pauses))
    if kept == "tokens":
        with pytest.raises(Exit):
            replay(str(path))
        assert "was killed by SIGSEGV" in capsys.readouterr().out
    else:
        replay(str(path))
        assert "3 requests" in capsys.readouterr().out


def test_what_was_asked_is_kept_only_if_that_is_allowed() -> None:
    memory = bytearray(REQUESTS_BYTES)
    FlightRequests(memory).add(ASKED)
    (shape,) = read_requests(memory, VOCAB)
    assert (len(shape.prompt), len(shape.generated), shape.max_tokens) == (3, 1, 6)
    assert (shape.sampling.temperature, shape.sampling.stop) == (0.5, ())
    assert not {*ASKED.prompt, *ASKED.generated} & {*shape.prompt, *shape.generated}
    memory = bytearray(REQUESTS_BYTES)
    offer = BlockOffer(b"1" * 16, 1, b"", (), 0, (), (), 1.0)  # it is gone when the request is replayed
    FlightRequests(memory, tokens=True).add(ASKED._replace(pull=offer))
    assert read_requests(memory, VOCAB) == [ASKED]


def test_what_does_not_fit_has_its_shape_alone() -> None:
    memory = bytearray(REQUESTS_BYTES)
    long = ASKED._replace(prompt=(70_000,) * (SLOT_BYTES // 4))
    FlightRequests(memory, tokens=True).add(long)
    (kept,) = read_requests(memory, VOCAB)
    assert len(kept.prompt) == len(long.prompt)
    assert 70_000 not in kept.prompt


def test_slots_are_used_again() -> None:
    memory = bytearray(REQUESTS_BYTES)
    requests = FlightRequests(memory)
    for id in range(2 * SLOTS):
        requests.add(ASKED._replace(id=id))
        requests.add(ASKED._replace(id=id, max_tokens=1))  # refused by the engine: the id is in use
    assert sorted(each.id for each in read_requests(memory, VOCAB)) == list(range(SLOTS))
    for id in range(2 * SLOTS):
        requests.end(id)
    assert read_requests(memory, VOCAB) == []
    requests.add(ASKED)
    (kept,) = read_requests(memory, VOCAB)
    assert (kept.id, kept.max_tokens) == (5, 6)


def test_what_a_dying_engine_has_damaged_is_left_out() -> None:
    memory = bytearray(REQUESTS_BYTES)
    requests = FlightRequests(memory)
    requests.add(ASKED)
    requests.add(ASKED._replace(id=6))
    memory[4:20] = b"\xff" * 16
    assert [each.id for each in read_requests(memory, VOCAB)] == [6]

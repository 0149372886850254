"""A steward and its keepers as processes, with toys as engines: who dies, and what becomes of the others."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Config
from penstock.engine.flight_recorder import FlightRecord
from penstock.errors import ConfigError, EngineUnavailable, PenstockError
from penstock.fleet import steward_link
from penstock.fleet.autoscaler import Autoscaler
from penstock.fleet.directory import Directory, ReplicaInfo, ReplicaState
from penstock.fleet.ground import steward_address
from penstock.fleet.keeper import Keeper
from penstock.fleet.run_file import FleetNotFound, find_fleet, read_run_file, run_file_of, write_run_file
from penstock.fleet.scale import FleetLoad, MeasuredLoad
from penstock.fleet.steward import Steward
from penstock.fleet.steward_link import StewardLink, StewardProcess, ask, lives
from penstock.fleet.steward_wire import (
    AskStatus,
    DrainReplica,
    FleetSpec,
    FleetStatus,
    KeeperReport,
    KeeperSpec,
    ScaleFleet,
    ScaleSpec,
    StartFailure,
    UpgradeFleet,
)
from penstock.fleet.timing import EngineTiming
from penstock.ipc import post_mortem
from penstock.ipc.launchers import SpawnLauncher
from penstock.types import Hello, Request
from tests.fleet.fake_host import LIMITS

TOYS = Path(__file__).parents[1] / "server" / "toys.py"
PATIENCE = 60.0
SECRET = "only for this fleet"


def spec_of(folder: Path, replicas: int, command: tuple[str, ...] = (sys.executable, str(TOYS))) -> FleetSpec:
    run_file = str(run_file_of(folder / "run", "toy"))
    config = Config(model="parrot", name="toy", post_mortem="off")
    about = {"host_command": command, "drain_seconds": 2.0}
    address = steward_address(str(folder), "local")
    return FleetSpec("toy", str(folder), address, SECRET, run_file, config, replicas, **about)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("f")


class Fleet:
    """A gateway's view of a fleet of toys."""

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.link = StewardLink(spec, lambda: StewardProcess(spec.folder))
        self.latest = Directory(0, ())

    async def follow(self) -> None:
        async for directory in self.link.changes():
            self.latest = directory

    async def until(self, true: Callable[[dict[str, ReplicaInfo]], bool]) -> dict[str, ReplicaInfo]:
        """Waits until something is true of those that have not ended."""
        async with asyncio.timeout(PATIENCE):
            while True:
                there = {each.name: each for each in self.latest.replicas if each.state is not ReplicaState.ENDED}
                if true(there):
                    return there
                await asyncio.sleep(0.02)

    async def until_ready(self, *names: str) -> dict[str, ReplicaInfo]:
        return await self.until(
            lambda there: (
                there.keys() == set(names) and all(each.state is ReplicaState.READY for each in there.values())
            )
        )

    async def status(self) -> FleetStatus:
        return await ask(read_run_file(Path(self.spec.run_file)), AskStatus(SECRET))

    async def processes(self) -> set[int]:
        status = await self.status()
        return {status.steward, *(pid for each in status.members for pid in (each.keeper, each.info.pid))} - {0}


@asynccontextmanager
async def running(spec: FleetSpec) -> AsyncIterator[Fleet]:
    fleet = Fleet(spec)
    try:
        fleet.latest = await fleet.link.start()
        following = asyncio.create_task(fleet.follow())
        yield fleet
        following.cancel()
    finally:
        await fleet.link.close()


def play(scene: Callable[[Fleet], Awaitable[None]], spec: FleetSpec) -> None:
    async def main() -> None:
        async with running(spec) as fleet:
            await scene(fleet)

    asyncio.run(main())


def gone(pids: set[int]) -> bool:
    until = time.monotonic() + PATIENCE
    while any(map(lives, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(lives, pids))


def test_a_steward_that_dies_is_replaced_and_no_engine_notices(folder: Path) -> None:
    async def scene(fleet: Fleet) -> None:
        before = await fleet.until_ready("toy-0", "toy-1")
        steward = (await fleet.status()).steward
        version = fleet.latest.version
        os.kill(steward, signal.SIGKILL)
        after = await fleet.until(lambda there: fleet.latest.version > version and len(there) == 2)
        assert after == before
        await asyncio.sleep(1)
        assert await fleet.until_ready("toy-0", "toy-1") == before
        assert (await fleet.status()).steward != steward

        os.kill(before["toy-0"].pid, signal.SIGKILL)  # an engine that dies is started again under its name
        after = await fleet.until(lambda there: there["toy-0"].pid not in (0, before["toy-0"].pid))
        assert after["toy-0"].address != before["toy-0"].address  # nobody takes it for the one before
        assert after["toy-1"] == before["toy-1"]
        (death,) = fleet.latest.deaths
        assert death == ("toy-0", before["toy-0"].epoch, False, ())
        assert [each.restarts for each in (await fleet.status()).members] == [1, 0]

    play(scene, spec_of(folder, 2))


def test_the_engine_of_a_keeper_that_dies_is_drained(folder: Path) -> None:
    async def scene(fleet: Fleet) -> None:
        before = await fleet.until_ready("toy-0", "toy-1")
        keeper = (await fleet.status()).members[0].keeper
        os.kill(keeper, signal.SIGKILL)
        orphan = (await fleet.until(lambda there: there["toy-0"].state is ReplicaState.DRAINING))["toy-0"]
        assert orphan.pid == before["toy-0"].pid
        assert lives(orphan.pid)  # its answers go on
        await fleet.until_ready("toy-1", "toy-2")
        os.kill(orphan.pid, signal.SIGKILL)  # it would end by itself after a minute

    play(scene, spec_of(folder, 2))


def test_scale_drain_and_upgrade(folder: Path) -> None:
    spec = spec_of(folder, 1)

    async def scene(fleet: Fleet) -> None:
        first = await fleet.until_ready("toy-0")
        await ask(spec, ScaleFleet(SECRET, 2))
        grown = await fleet.until_ready("toy-0", "toy-1")
        assert grown["toy-0"] == first["toy-0"]
        await ask(spec, DrainReplica(SECRET, "toy-0"))
        await fleet.until_ready("toy-1")
        assert gone({first["toy-0"].pid})
        least = 9

        def is_new(there: dict[str, ReplicaInfo]) -> bool:
            nonlocal least
            least = min(least, sum(each.state is ReplicaState.READY for each in there.values()))
            return there.keys() == {"toy-2"}

        await ask(spec, UpgradeFleet(SECRET, replace(spec.config, max_rows=3)))
        await fleet.until(is_new)
        assert least == 1  # one was ready all the time
        assert read_run_file(Path(spec.run_file)).config.max_rows == 3
        with pytest.raises(ConfigError, match="there is no replica 'toy-9'; the replicas are toy-2"):
            await ask(spec, DrainReplica(SECRET, "toy-9"))
        with pytest.raises(PenstockError, match="the secret is not that of this fleet"):
            await ask(spec, AskStatus("guessed"))

    play(scene, spec)


TIMING = EngineTiming()
QUIET = MeasuredLoad(FleetLoad(0.01, 500, 600, 100), TIMING)
BUSY = MeasuredLoad(FleetLoad(30.0, 11_000, 12_200, 340), TIMING)  # needs more replicas than are allowed


def test_a_fleet_follows_its_load_within_bounds_unless_somebody_says_how_many(folder: Path) -> None:
    spec = spec_of(folder, 1)
    spec = msgspec.structs.replace(spec, scaling=ScaleSpec(1, 3, patience=0.5))

    async def scene(fleet: Fleet) -> None:
        await fleet.until_ready("toy-0")
        fleet.link.measure = lambda: QUIET
        await asyncio.sleep(1.5)
        assert (await fleet.status()).replicas == 1
        fleet.link.measure = lambda: BUSY
        await fleet.until_ready("toy-0", "toy-1", "toy-2")
        scale = (await fleet.status()).scale
        assert scale is not None
        assert scale[:3] == (3, 1, 3)
        assert "30 requests/s of 11,000 uncached and 340 output tokens: 3 cannot keep up" in scale.reason
        assert fleet.link.scale is not None
        assert fleet.link.scale[:3] == (3, 1, 3)

        steward = (await fleet.status()).steward
        os.kill(steward, signal.SIGKILL)  # the next one knows the bounds
        fleet.link.measure = lambda: QUIET
        await fleet.until(lambda there: len(there) == 1)
        assert (await fleet.status()).replicas == 1

        assert (await ask(spec, ScaleFleet(SECRET, 2))).scale == (2, 2, 2, "")
        fleet.link.measure = lambda: BUSY
        await fleet.until(lambda there: len(there) == 2)
        await asyncio.sleep(1.5)
        assert (await fleet.status()).replicas == 2
        told = await ask(spec, ScaleFleet(SECRET, 1, 4))
        assert told.scale is not None
        assert told.scale[:3] == (2, 1, 4)
        await fleet.until(lambda there: len(there) == 4)
        for wrong in ((0, 0), (3, 2), (1, 10_001)):
            with pytest.raises(ConfigError, match="a fleet has from 1 to 10000 replicas, the fewest first; got"):
                await ask(spec, ScaleFleet(SECRET, *wrong))

    play(scene, spec)


@given(st.lists(st.lists(st.floats(0, 5), max_size=3), max_size=20), st.integers(1, 4), st.integers(0, 4))
def test_the_size_of_a_fleet_stays_within_its_bounds(loads: list[list[float]], least: int, more: int) -> None:
    spec = spec_of(Path("nowhere"), least)
    scaler = Autoscaler(msgspec.structs.replace(spec, scaling=ScaleSpec(least, least + more, patience=3.0)))
    wanted = least
    for now, arrivals in enumerate(loads):
        measured = [MeasuredLoad(BUSY.load._replace(arrivals=each), TIMING) for each in arrivals]
        decided = scaler.decide(measured, wanted, float(now))
        assert decided == wanted or (measured and more)
        assert least <= decided <= least + more
        assert decided >= wanted - 1
        wanted = decided
        assert scaler.status(wanted)[:3] == (wanted, least, least + more)


def test_a_fleet_ends_with_its_last_gateway_and_leaves_nothing(folder: Path) -> None:
    spec = spec_of(folder, 2)
    left: set[int] = set()

    async def scene(fleet: Fleet) -> None:
        await fleet.until_ready("toy-0", "toy-1")
        assert stat.S_IMODE(os.stat(spec.run_file).st_mode) == 0o600
        assert find_fleet(Path("elsewhere"), spec.run_file) == find_fleet(Path(spec.run_file).parent, "toy")
        second = StewardLink(find_fleet(Path(spec.run_file).parent))
        assert (await second.start()).replicas == fleet.latest.replicas
        await second.close()
        left.update(await fleet.processes())
        assert len(left) == 5
        assert all(map(lives, left))

    play(scene, spec)
    assert gone(left)
    assert not Path(spec.run_file).exists()
    assert not folder.exists()
    with pytest.raises(FleetNotFound, match="no fleet runs here: start one with `penstock fleet serve`"):
        find_fleet(Path(spec.run_file).parent)


def test_a_fleet_is_found_by_its_name_beside_a_file_that_cannot_be_read(folder: Path) -> None:
    spec = spec_of(folder, 1)
    write_run_file(spec)
    run = Path(spec.run_file).parent
    run_file_of(run, "broken").write_text("{")
    assert find_fleet(run, "toy") == spec
    with pytest.raises(FleetNotFound, match=r"broken\.fleet\.json cannot be read"):
        find_fleet(run)
    with pytest.raises(FleetNotFound, match="no fleet called 'other' runs here"):
        find_fleet(run, "other")


def test_an_upgrade_and_its_end_are_written_for_the_next_steward(folder: Path) -> None:
    class NoGround:
        async def start(self, keeper: KeeperSpec) -> None: ...

        async def forget(self, name: str) -> None: ...

        async def close(self) -> None: ...

    async def main() -> None:
        spec = spec_of(folder, 1)
        steward = Steward(spec, lambda *_: NoGround())
        ready = ReplicaInfo("toy-0", "ipc://x", 1, 1, ReplicaState.READY)
        steward._roster.take(KeeperReport(SECRET, ready, 2, 0), 0.0)
        steward._roster._next_start = 1e9  # it comes to nothing else meanwhile
        steward._obey(UpgradeFleet(SECRET, replace(spec.config, max_rows=3)))
        assert read_run_file(Path(spec.run_file)).config.max_rows == 3
        why = StartFailure("config_error", "no")
        steward._roster.take(KeeperReport(SECRET, ReplicaInfo("toy-1"), 3, 1, attempts=2, failure=why), 0.0)
        steward._look()
        assert read_run_file(Path(spec.run_file)).config == spec.config
        steward._link.close()

    asyncio.run(main())


def test_a_keeper_that_is_ended_while_it_writes_about_a_death_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), []

    class Dead:
        hello, crashed, innocent, last_flight = Hello("1", 7, "m", LIMITS), True, False, FlightRecord

        def last_stack(self) -> str:
            return ""

        async def last_suspects(self) -> tuple[tuple[str, int], ...]:
            return ()

        def last_requests(self) -> list[Request]:
            return []

        async def end(self, grace: float) -> None:
            ended.append(grace)

    def write(*_: object) -> None:
        begun.set()
        go_on.wait(PATIENCE)

    monkeypatch.setattr(post_mortem, "write_about", write)

    async def main() -> None:
        spec = KeeperSpec("toy-0", f"ipc://{folder}/steward", SECRET, str(folder), "", Config(model="m"), 0)
        keeper = Keeper(spec, SpawnLauncher())
        losing = asyncio.create_task(keeper._lose(Dead(), "it fell"))  # type: ignore[arg-type]
        await asyncio.to_thread(begun.wait, PATIENCE)
        losing.cancel()
        await asyncio.wait({losing})
        go_on.set()
        keeper._context.destroy(linger=0)

    asyncio.run(main())
    assert len(ended) == 1


def test_a_gateway_that_cannot_follow_its_fleet_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steward_link, "ANSWER_SECONDS", 0.1)

    def fail() -> MeasuredLoad | None:
        raise ValueError("no number")

    async def main() -> None:
        link = StewardLink(spec_of(folder, 1))
        link.measure = fail
        starting = asyncio.create_task(link.start())
        async with asyncio.timeout(PATIENCE):
            while not caplog.records:
                await asyncio.sleep(0.01)
        starting.cancel()
        await link.close()

    asyncio.run(main())
    assert "does not follow its fleet any more" in caplog.text
    assert "no number" in caplog.text


def test_what_keeps_every_engine_from_starting_is_raised(folder: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"exited with code 3 before it was ready"):
        play(None, spec_of(folder, 2, (sys.executable, "-c", "raise SystemExit(3)")))  # type: ignore[arg-type]
    assert not folder.exists()

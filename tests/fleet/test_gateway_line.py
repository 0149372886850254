"""Requests that wait at a gateway until a replica has room: over real engine processes, which die meanwhile, too."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from penstock.fleet.client import FleetClient
from penstock.fleet.queue import AHEAD
from penstock.types import Aborted, Claim, Event, Failed, Finished, Report, Tokens
from tests.engine.test_ipc import run
from tests.fleet.fake_host import LIMITS
from tests.fleet.fleets import fleet, until_ready
from tests.fleet.test_client import Follower, check, request, until

MOST = LIMITS.max_rows + LIMITS.max_rows // AHEAD  # requests that a replica is sent at once


async def ask(client: Any, number: int, max_tokens: int = 40, **more: Any) -> list[Event]:
    asked = request(client, [1, 2, number], max_tokens, **more)
    events = [event async for events in client.submit(asked) for event in events]
    if isinstance(events[-1], Finished):
        check(events, [1, 2, number], max_tokens)
    return events


def report(events: list[Event]) -> Report:
    assert isinstance(events[-1], Finished)
    assert events[-1].report is not None
    return events[-1].report


def observe(client: FleetClient) -> list[int]:
    """Returns a list that the most requests of each report of a replica are added to."""
    seen: list[int] = []
    note = client._lifecycle.totals.note

    def noted(replica: Any, stats: Any) -> None:
        seen.append(stats.running + stats.waiting)
        note(replica, stats)

    client._lifecycle.totals.note = noted  # type: ignore[method-assign]
    return seen


def test_what_replicas_have_no_room_for_waits_here() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, _):
            await until_ready(client, 2)
            seen = observe(client)
            answers = await asyncio.gather(*(ask(client, number) for number in range(120)))
            assert LIMITS.max_rows // 2 < max(seen) <= MOST  # they have enough to do meanwhile
            turns = client.fleet_figures.decisions["turns"]
            assert turns["at_once"] == 2 * MOST
            assert turns["waited"] == 120 - 2 * MOST
            assert client._router.in_line == client.stats.in_line == 0
            waits = [dict(report(events).waited).get("gateway", 0.0) for events in answers]
            assert waits[: 2 * MOST] == [0.0] * 2 * MOST
            assert min(waits[2 * MOST :]) > 0
            assert client.fleet_figures[:3] == (0, pytest.approx(sum(waits)), None)

    run(scenario())


def test_nobody_waits_while_there_is_room() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, _):
            await until_ready(client, 2)
            for _ in range(5):
                await asyncio.gather(*(ask(client, number, 10) for number in range(20)))
            assert client.fleet_figures.decisions["turns"] == {"at_once": 100}

    run(scenario())


def test_tenants_have_their_shares_and_first_requests_do_not_wait() -> None:
    async def scenario() -> None:
        async with fleet(1) as (client, _):
            ended: list[str] = []

            async def of(tenant: str, number: int, **more: Any) -> Report:
                told = report(await ask(client, number, claim=Claim(tenant), **more))
                ended.append(tenant)
                return told

            greedy = [asyncio.create_task(of("greedy", number)) for number in range(100)]
            await until(lambda: client._router.in_line > 60)
            first = asyncio.create_task(of("light", 200))
            await asyncio.sleep(0)
            later = [asyncio.create_task(of("light", 201 + number)) for number in range(5)]
            urgent = asyncio.create_task(of("greedy", 300, priority=-1))
            assert "gateway" not in dict((await first).waited)  # the engine lets it go before the others
            assert dict((await later[0]).waited)["gateway"] > 0
            await asyncio.gather(*later, urgent)
            assert ended.count("greedy") < 70  # those of the others had to wait for more than a third of them
            await asyncio.gather(*greedy)

    run(scenario())


def test_background_requests_leave_room_for_others() -> None:
    async def scenario() -> None:
        async with fleet(1) as (client, _):
            seen = observe(client)
            later = [asyncio.create_task(ask(client, number, 60, background=True)) for number in range(40)]
            while client.in_flight < 40:
                await asyncio.sleep(0)
            assert client._router.in_line == 40 - LIMITS.max_rows // 2
            await until(lambda: LIMITS.max_rows // 2 in seen)
            soon = await asyncio.gather(*(ask(client, 100 + number, 4) for number in range(4)))
            assert not any(dict(report(events).waited) for events in soon)
            assert client._router.in_line > 0
            await asyncio.gather(*later)

    run(scenario())


def test_who_waits_can_leave_be_aborted_or_expire() -> None:
    async def scenario() -> None:
        async with fleet(1) as (client, _):
            running = [asyncio.create_task(ask(client, number, 400)) for number in range(MOST)]
            await until(lambda: client.stats.running == LIMITS.max_rows)
            waiting = request(client, [5], 4)
            aborted = asyncio.create_task(anext(client.submit(waiting)))
            leaving = client.submit(request(client, [6], 4))
            left = asyncio.create_task(anext(leaving))
            patient = asyncio.create_task(ask(client, 8, claim=Claim(deadline=60.0)))
            await until(lambda: client._router.in_line == 3)
            client.abort(waiting.id)
            assert await aborted == [Aborted(waiting.id)]
            left.cancel()
            await asyncio.wait([left])
            await leaving.aclose()
            assert client._router.in_line == 1
            (failed,) = await ask(client, 7, claim=Claim(deadline=0.1))
            assert isinstance(failed, Failed)
            assert failed.code == "wait_too_long"
            assert "the deadline passed after 0.1 s in line" in failed.message
            assert client._router.in_line == 1
            assert dict(report(await patient).waited)["gateway"] > 0.1
            await asyncio.gather(*running)
            turns = client.fleet_figures.decisions["turns"]
            assert turns == {"at_once": MOST, "left": 2, "expired": 1, "waited": 1}
            assert client.in_flight == client._router.in_line == 0

    run(scenario())


@pytest.mark.parametrize("killed", [1, 3])
def test_replicas_that_die_lose_nobody_who_waits(killed: int) -> None:
    async def scenario() -> None:
        async with fleet(3) as (client, keepers):
            await until_ready(client, 3)
            asking = [asyncio.create_task(ask(client, number, 150)) for number in range(150)]
            await until(lambda: client._router.in_line > 20 and client.stats.generated_tokens > 200)
            for number in range(killed):
                keepers.kill(f"fake-{number}")
            for events in await asyncio.gather(*asking):
                assert isinstance(events[-1], Finished)
            turns = client.fleet_figures.decisions["turns"]
            assert turns["waited"] + turns["at_once"] == 150

    run(scenario())


def test_those_who_wait_are_told_when_there_will_be_no_replica() -> None:
    async def scenario() -> None:
        async with fleet(1, restart=False) as (client, keepers):
            asking = [asyncio.create_task(ask(client, number, 400)) for number in range(40)]
            await until(lambda: client._router.in_line > 10)
            keepers.kill("fake-0")
            codes = {getattr(events[-1], "code", "") for events in await asyncio.gather(*asking)}
            assert codes == {"engine_died"}
            assert client._router.in_line == client.in_flight == 0

    run(scenario())


def test_draining_under_load_loses_nobody() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            asking = [asyncio.create_task(ask(client, number, 60)) for number in range(100)]
            while client._router.in_line <= 50:
                await asyncio.sleep(0)
            keepers.drain("fake-0")
            for events in await asyncio.gather(*asking):
                assert isinstance(events[-1], Finished)

    run(scenario())


def test_the_load_has_all_requests_those_that_were_refused_too() -> None:
    async def scenario() -> None:
        async with fleet(1) as (client, _):
            assert client.measured_load() is not None
            await asyncio.gather(*(ask(client, number) for number in range(30)))
            for number in range(30):
                client.note_refused(request(client, [9, 9, number]))
            measured = client.measured_load()
            assert measured is not None
            assert measured.load.arrivals == pytest.approx(60 / 10, rel=0.5)
            assert measured.load[1:] == pytest.approx((3, 23, 40))
            assert measured.timing.max_rows == LIMITS.max_rows

    run(scenario())


def test_two_gateways_share_the_room() -> None:
    async def scenario() -> None:
        async with fleet(2) as (client, keepers):
            await until_ready(client, 2)
            other = FleetClient(Follower(keepers), name="other")
            await other.start()
            await until_ready(other, 2)
            seen = observe(client)
            asking = [ask(gateway, number) for number in range(100) for gateway in (client, other)]
            for events in await asyncio.gather(*asking):
                assert isinstance(events[-1], Finished)
            assert max(seen[40:]) <= 2 * MOST  # they hear of each other's requests a step later
            assert client.fleet_figures.decisions["turns"]["waited"] > 50
            assert other.fleet_figures.decisions["turns"]["waited"] > 50
            await other.close()

    run(scenario())


def test_a_stream_that_is_left_frees_its_place_for_who_waits() -> None:
    async def scenario() -> None:
        async with fleet(1) as (client, _):
            async with aclosing(client.submit(request(client, [1, 2], 4000))) as long:
                assert isinstance((await anext(long))[0], Tokens)
                others = [asyncio.create_task(ask(client, number, 300)) for number in range(MOST)]
                await until(lambda: client._router.in_line == 1)
            for events in await asyncio.gather(*others):
                assert isinstance(events[-1], Finished)

    run(scenario())


def test_a_gateway_that_comes_to_a_busy_fleet_waits_for_its_room() -> None:
    async def scenario() -> None:
        async with fleet(1) as (client, keepers):
            asking = [asyncio.create_task(ask(client, number, 200)) for number in range(40)]
            await until(lambda: client.stats.running == LIMITS.max_rows)
            other = FleetClient(Follower(keepers), name="other")
            await other.start()
            for events in await asyncio.gather(*(ask(other, number, 20) for number in range(10)), *asking):
                assert isinstance(events[-1], Finished)
            await other.close()

    run(scenario())

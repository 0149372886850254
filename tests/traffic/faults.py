"""Sends signals to the processes of a server under streams, and compares every stream with the one without faults."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx

from tests.traffic.answers import Broken, judge, read
from tests.traffic.asking import Ask, Drawer, with_limit
from tests.traffic.in_engine.sitecustomize import ASSERTION, SHORTAGE
from tests.traffic.material import our_material
from tests.traffic.mixed import Mixed, Received, Violation
from tests.traffic.served import Server, serving

IN_ENGINE = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "in_engine"), os.environ.get("PYTHONPATH", "")])
}
APPEARS = 60.0  # seconds in which a part should be there again
LOST = 120.0  # seconds of silence after which a stream counts as lost
UNDISTURBED = "no fault in it"


class Fault(NamedTuple):
    """Is a signal to a part of a server."""

    part: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} of the {self.part}"

    @property
    def signal(self) -> int:
        ours = {"assertion": ASSERTION, "shortage": SHORTAGE}
        return ours.get(self.kind) or signal.Signals[f"SIG{self.kind}"]

    @property
    def ends_engine(self) -> bool:
        return self.part == "engine" and self.kind != "shortage"


PARTS = ("engine", "fork parent", "standby", "render worker")
KILLS = tuple(Fault(part, kind) for part in PARTS for kind in ("KILL", "STOP"))
DEVICE_FAULTS = (Fault("engine", "assertion"), Fault("engine", "shortage"))  # of a server with IN_ENGINE


@dataclass
class Damage:
    """Counts what became of streams, and what happened to their server."""

    streams: int = 0
    happened: list[tuple[float, Fault]] = field(default_factory=list)
    missed: Counter[Fault] = field(default_factory=Counter)  # there was no such process then
    silences: dict[str, list[float]] = field(default_factory=dict)  # the longest of each stream, in seconds
    violations: list[Violation] = field(default_factory=list)
    restarts: float = 0  # of the engine
    replaced: dict[Fault, list[float]] = field(default_factory=dict)  # seconds until there was another engine

    def note(self, _: Ask, received: Received) -> None:
        """Counts the longest silence of a stream with the first fault in it."""
        self.streams += 1
        seconds, end = received.silence
        faults = (str(fault) for at, fault in self.happened if end - seconds < at < end)
        self.silences.setdefault(next(faults, UNDISTURBED), []).append(seconds)

    def table(self) -> str:
        counts = Counter(fault for _, fault in self.happened)
        lines = [f"{self.streams} streams, {len(self.violations)} violations, {len(self.happened)} faults"]
        lines += [f"  {count} x {fault}" for fault, count in sorted(counts.items())]
        lines += [f"  {count} x no process for {fault}" for fault, count in sorted(self.missed.items())]
        for fault, found in sorted(self.replaced.items()):
            middle, longest = sorted(found)[len(found) // 2], max(found)
            lines.append(f"another engine after {fault}: median {middle:.2f} s, most {longest:.2f} s")
        for reason, silences in sorted(self.silences.items()):
            silences.sort()
            middle, high = silences[len(silences) // 2], silences[min(int(len(silences) * 0.99), len(silences) - 1)]
            lines.append(f"longest silence, {reason}: {len(silences)} streams, median {middle:.2f} s, p99 {high:.2f} s")
        return "\n".join(lines)


class Plan(NamedTuple):
    """Says which faults happen, and how many seconds lie between two. In the `calm` seconds before them no engine may
    be replaced."""

    faults: Sequence[Fault]
    every: tuple[float, float]
    streams: int = 32
    rounds: int = 1  # every fault happens so often
    calm: float = 0.0

    def drawn(self, random: Random) -> Iterator[tuple[float, Fault]]:
        for _ in range(self.rounds):
            for fault in random.sample(self.faults, len(self.faults)):
                yield random.uniform(*self.every), fault


async def disturb(server: Server, drawer: Drawer, plan: Plan, random: Random) -> Damage:
    """Streams answers while the faults happen, and as long after as the last streams take."""
    damage = Damage()
    asks = [drawer.lasting() for _ in range(plan.streams)]
    limits = httpx.Limits(max_connections=plan.streams + 8)
    async with httpx.AsyncClient(base_url=server.url, timeout=LOST, limits=limits) as http:
        streams = Mixed(http)
        await asyncio.gather(*(streams.ask(ask) for ask in asks))  # what every stream must be
        streams.on_received = damage.note
        over = asyncio.Event()

        async def client(number: int) -> None:
            while not over.is_set() and not streams.hopeless:
                await streams.ask(asks[number])

        clients = [asyncio.create_task(client(number)) for number in range(plan.streams)]
        await asyncio.sleep(plan.calm)
        if (engine := await asyncio.to_thread(server.engine_now)) != server.engine:
            damage.violations.append(Violation(f"without a fault, engine {server.engine} became {engine}", None))
        for pause, fault in plan.drawn(random):
            await asyncio.sleep(pause)
            await asyncio.to_thread(inject, server, fault, damage)
        await asyncio.sleep(plan.every[1])
        over.set()
        await asyncio.gather(*clients)
        damage.violations += streams.tally.violations
    damage.restarts = (await asyncio.to_thread(server.until_idle))["penstock_engine_restarts_total"]
    if server.http.get("/health?generate=1").status_code != 200:
        damage.violations.append(Violation("the server has not recovered", None, server.http.get("/health").text))
    return damage


def inject(server: Server, fault: Fault, damage: Damage) -> None:
    """Sends a fault's signal as soon as there is such a process."""
    deadline = time.monotonic() + APPEARS
    while (process := server.processes().get(fault.part)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if process is None:
        damage.missed[fault] += 1
        return
    began = time.monotonic()
    damage.happened.append((began, fault))
    os.kill(process.pid, fault.signal)
    while fault.ends_engine and time.monotonic() < began + APPEARS:
        if server.engine_now() not in (process.pid, None):
            damage.replaced.setdefault(fault, []).append(time.monotonic() - began)
            return
        time.sleep(0.02)


@contextmanager
def loaded(share: float) -> Iterator[None]:
    """Has `share` busy processes for each processor."""
    command = [sys.executable, "-c", "while True: sum(range(10000))"]
    busy = [subprocess.Popen(command) for _ in range(round(share * (os.cpu_count() or 1)))]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def disturbed(home: Path, model: Path | str, plan: Plan, *options: str, seed: int = 0) -> Damage:
    """Serves a model, lets faults happen under streams, and stops the server. Nothing may be left of it."""
    random = Random(seed)
    with serving(home, model, *options, environment=IN_ENGINE) as server:
        damage = asyncio.run(disturb(server, Drawer(our_material(), random), plan, random))
        damage.violations += [Violation(problem, None) for problem in server.end()]
    return damage


def killed_server(home: Path, model: Path | str, *options: str) -> list[str]:
    """Serves a model and kills the server under streams. Returns what is wrong: streams that end as if they were whole,
    what is left of the server, and a next server that does not start or answers otherwise."""
    ask = Drawer(our_material(), Random(0)).lasting()
    with serving(home, model, *options) as server:
        before = asyncio.run(answers_of(server, [ask]))
        left = asyncio.run(kill_under_streams(server, Drawer(our_material(), Random(1))))
    with serving(home, model, *options) as server:
        after = asyncio.run(answers_of(server, [ask]))
        left += server.end()
    return left if after == before else [*left, f"the next server answers {after} instead of {before}"]


async def answers_of(server: Server, asks: list[Ask]) -> list[Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=LOST) as http:
        mixed = Mixed(http)
        received = [await mixed.receive(ask) for ask in asks]
    return [read(ask, each.content).plain for ask, each in zip(asks, received, strict=True) if each is not None]


async def kill_under_streams(server: Server, drawer: Drawer, streams: int = 32) -> list[str]:
    """Kills the server; returns the streams that did not break, and the processes that are left."""
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=LOST, limits=limits) as http:
        mixed = Mixed(http)
        asks = [with_limit(drawer.lasting(), 1000) for _ in range(streams)]
        asking = [asyncio.create_task(mixed.receive(ask)) for ask in asks]
        while (await asyncio.to_thread(server.metrics))['penstock_requests{state="running"}'] < streams / 2:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(server.processes)
        server.process.kill()
        ended = await asyncio.gather(*asking, return_exceptions=True)
    server.process.wait()
    wrong = [
        f"a stream did not break: {answer}" for ask, answer in zip(asks, ended, strict=True) if is_whole(ask, answer)
    ]
    return wrong + server.left()


def is_whole(ask: Ask, ended: Received | BaseException | None) -> bool:
    """Returns whether a client takes an answer for whole that came in less than its server's life."""
    if not isinstance(ended, Received):
        return False
    try:
        answer = read(ask, ended.content)
    except Broken:
        return False
    return answer.ended and bool([*judge(ask, answer)])

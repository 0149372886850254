"""Measures a fleet's gateway: `python bench/fleet_served.py overhead` and `python bench/fleet_served.py kill`.

`overhead` serves engines that answer at once, directly and through a gateway in turn, and compares the time to the
first token and the chunks per second at 64 clients. `kill` runs `penstock fleet serve smollm2 --replicas 3`, kills one
engine under 12 streams of each kind, and compares every answer with the one without a kill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from itertools import chain
from typing import Any

import httpx
from crash import KINDS, QUESTIONS, Question, Streams, Tally
from instant import open_instant
from served import free_port, until_ready

from penstock.config import Config
from penstock.fleet.directory import Directory, ReplicaInfo, ReplicaState
from penstock.ipc.client import EngineClient
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.process import EngineProcess

HOST = SpawnLauncher((sys.executable, __file__, "host"))
CHUNKS = 128  # of an answer
BODY = {"model": "instant", "prompt": "Once upon a time", "max_tokens": CHUNKS, "stream": True, "ignore_eos": True}


class FixedFleet:
    """Starts engines and tells the gateway of them."""

    secret = "of the benchmark"

    def __init__(self, count: int) -> None:
        self._count = count
        self._engines: list[EngineProcess] = []

    async def start(self) -> Directory:
        config = Config(model="instant", listen="ipc://*", secret=self.secret)
        self._engines = [await EngineProcess.launch(HOST, config) for _ in range(self._count)]
        hellos = [engine.hello for engine in self._engines]
        about = [(hello.address, hello.pid, hello.epoch, ReplicaState.READY) for hello in hellos]
        return Directory(1, tuple(ReplicaInfo(f"instant-{number}", *each) for number, each in enumerate(about)))

    async def changes(self) -> AsyncIterator[Directory]:
        await asyncio.Event().wait()
        yield Directory(1, ())

    async def close(self) -> None:
        for engine in self._engines:
            await engine.end(1)


def serve(kind: str, port: int) -> None:
    """Serves engines that answer at once: one directly, or three through a gateway."""
    from penstock.cli.terminal import obtain
    from penstock.fleet.client import FleetClient
    from penstock.ipc.spawn import ProcessClient
    from penstock.model.load import load_text
    from penstock.server.app import serve
    from penstock.server.models.pool import ModelPool
    from penstock.server.models.source import ModelSource

    path = obtain("smollm2")

    def client() -> EngineClient:
        return ProcessClient(Config(model="instant"), HOST) if kind == "direct" else FleetClient(FixedFleet(3))

    serve(ModelPool([ModelSource("instant", client, lambda: load_text(path), path)]), "127.0.0.1", port)


# -- overhead -----------------------------------------------------------------------------------------------------


async def start(kind: str) -> tuple[Process, int]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "server", kind, str(port), stderr=DEVNULL)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        await until_ready(http)
    return process, port


async def stream(port: int, body: dict[str, Any]) -> tuple[float, int]:
    """Returns the seconds to the first chunk, and the number of chunks, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    began, first, chunks = time.perf_counter(), 0.0, 0
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    while part := await reader.read(1 << 16):
        if found := part.count(b"data: {"):
            first = first or time.perf_counter() - began
            chunks += found
    writer.close()
    return first, chunks


def processor_seconds(process: Process) -> float:
    """Returns the processor time that a server has used itself: it tells more than a clock on a busy machine."""
    with open(f"/proc/{process.pid}/stat") as file:
        used = file.read().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


async def first_tokens(port: int, tries: int) -> list[float]:
    return [1000 * (await stream(port, BODY | {"max_tokens": 1}))[0] for _ in range(tries)]


async def load(port: int, clients: int, answers: int) -> float:
    """Returns the chunks per second that so many clients get."""

    async def client() -> int:
        return sum([(await stream(port, BODY))[1] for _ in range(answers)])

    began = time.perf_counter()
    chunks = sum(await asyncio.gather(*(client() for _ in range(clients))))
    return chunks / (time.perf_counter() - began)


class Measured:
    """Collects what was measured of one server."""

    def __init__(self, process: Process, port: int) -> None:
        self.process, self.port = process, port
        self.firsts: list[float] = []  # milliseconds
        self.rates: list[float] = []  # chunks per second
        self.per_request: list[float] = []  # microseconds of the server's processor time
        self.per_chunk: list[float] = []

    async def measure_firsts(self, tries: int = 100) -> None:
        before = processor_seconds(self.process)
        self.firsts += await first_tokens(self.port, tries)
        self.per_request.append(1e6 * (processor_seconds(self.process) - before) / tries)

    async def measure_rate(self, clients: int = 64, answers: int = 2) -> None:
        before = processor_seconds(self.process)
        self.rates.append(await load(self.port, clients, answers))
        used = processor_seconds(self.process) - before
        self.per_chunk.append(1e6 * used / (clients * answers * CHUNKS))

    def report(self, kind: str) -> None:
        first = ", ".join(f"{time:.2f}" for time in self.quartiles())
        print(f"{kind}: first token after {first} ms (least, first quartile, median)")
        print(f"{kind}: {max(self.rates):,.0f} chunks/s at 64 clients; processor time {min(self.per_request):.0f} us a")
        print(f"  request with one token, {min(self.per_chunk):.1f} us a chunk (least of {len(self.rates)} rounds)")

    def quartiles(self) -> tuple[float, ...]:
        return min(self.firsts), *statistics.quantiles(self.firsts, n=4)[:2]


async def overhead(options: argparse.Namespace) -> None:
    servers = {kind: Measured(*await start(kind)) for kind in ("direct", "gateway")}
    try:
        for _ in range(options.rounds):
            for measured in servers.values():
                await measured.measure_firsts()
                await measured.measure_rate()
    finally:
        for measured in servers.values():
            measured.process.terminate()
            await measured.process.wait()
    for kind, measured in servers.items():
        measured.report(kind)
    direct, gateway = (measured.quartiles() for measured in servers.values())
    added = ", ".join(f"{through - alone:.2f}" for alone, through in zip(direct, gateway, strict=True))
    print(f"the gateway adds {added} ms (least, first quartile, median)")


# -- kill ---------------------------------------------------------------------------------------------------------

KINDS["n=3"] = {"n": 3}
KINDS["penalties"] = {"presence_penalty": 0.5, "frequency_penalty": 0.3}
MEASURED = ("plain", "schema", "tools", "n=3", "logprobs", "penalties")


async def kill(options: argparse.Namespace) -> int:
    port = free_port()
    options.name = f"fleet-{port}"  # another one may run on this machine
    more = ("--replicas", "3", "--port", str(port), "--name", options.name, "--threads", "1", *options.more)
    command = sys.executable, "-m", "penstock", "fleet", "serve", options.model, *more
    process = await asyncio.create_subprocess_exec(*command)
    failed = 0
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as http:
            await until_ready(http)
            for kind in options.kinds or MEASURED:
                failed += await kill_under(http, kind, options)
    finally:
        process.terminate()
        await process.wait()
    return failed


async def kill_under(http: httpx.AsyncClient, kind: str, options: argparse.Namespace) -> int:
    """Kills a replica under streams of one kind; returns how many were lost or differ."""
    await until_whole(http)
    questions = [
        Question(kind, QUESTIONS[number % len(QUESTIONS)], number, options.tokens) for number in range(options.streams)
    ]
    streams, undisturbed, tally = Streams(http, options.name), Tally(), Tally()
    await streams.learn(questions)
    await asyncio.gather(*(streams.check(question, undisturbed) for question in questions))
    checking = [asyncio.create_task(streams.check(question, tally)) for question in questions]
    await asyncio.sleep(options.after)
    replica = random.choice((await http.get("/health")).json()["replicas"])
    os.kill(replica["pid"], signal.SIGKILL)
    await asyncio.gather(*checking)
    gaps, before = (sorted(chain.from_iterable(each.gaps.values())) for each in (tally, undisturbed))
    print(
        f"{kind}: {tally.answers} streams, {len(tally.lost)} lost, {len(tally.different)} different; longest gap "
        f"{gaps[-1]:.2f} s, median {statistics.median(gaps):.2f} s; without a kill {before[-1]:.2f} s, "
        f"{statistics.median(before):.2f} s",
        flush=True,
    )
    for line in (tally.lost + tally.different)[:3]:
        print(line[:600])
    return len(tally.lost) + len(tally.different)


async def until_whole(http: httpx.AsyncClient) -> None:
    """Returns when all replicas are ready."""
    while any(replica["state"] != "ready" for replica in (await http.get("/health")).json()["replicas"]):
        await asyncio.sleep(0.1)


def main() -> int:
    if sys.argv[1:2] == ["host"]:
        from penstock.ipc.host import host

        sys.argv.pop(1)
        host(lambda config, _: open_instant(config))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "kill", "server"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kinds", nargs="*", choices=MEASURED)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--after", type=float, default=1.5, help="seconds from the first request to the kill")
    options, options.more = parser.parse_known_args()
    if options.what == "server":
        serve(options.more[0], int(options.more[1]))
    elif options.what == "overhead":
        from penstock.tools.bench.load import run

        run(overhead(options))
    else:
        return asyncio.run(kill(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())

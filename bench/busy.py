"""Loads the machine beside `penstock serve`, and counts the engines that are killed though they do not hang; then stops
engines, and measures how soon another takes over: `python bench/busy.py --load 4 --seconds 60`."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time

import httpx
from crash import Question, Streams, Tally, ask_until, questions_of, serve
from served import free_port, until_ready

BUSY = "while True: sum(range(10000))"


def load_machine(share: float) -> list[subprocess.Popen[bytes]]:
    """Starts `share` busy processes per processor."""
    count = round(share * len(os.sched_getaffinity(0)))
    return [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]


async def engine_of(http: httpx.AsyncClient) -> int:
    """Returns the engine process once there is one that answers."""
    while True:
        health = (await http.get("/health")).json()
        if health["status"] == "ok":
            return int(health["engine"]["pid"])
        await asyncio.sleep(0.02)


async def replaced(http: httpx.AsyncClient) -> float:
    """Stops the engine; returns the seconds until another one is ready."""
    pid, begun = await engine_of(http), time.perf_counter()
    os.kill(pid, signal.SIGSTOP)
    while await engine_of(http) == pid:
        await asyncio.sleep(0.02)
    return time.perf_counter() - begun


async def ask_on(streams: Streams, questions: list[Question], stopped: asyncio.Event, tally: Tally) -> None:
    """Asks until all engines were stopped: one that has nothing to do may be stopped for ever."""
    while not stopped.is_set():
        await streams.check(random.choice(questions), tally)


async def measure(options: argparse.Namespace, url: str) -> Tally:
    questions = questions_of(options.tokens)
    tally = Tally()
    limits = httpx.Limits(max_connections=options.streams + 8)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await until_ready(http)
        streams = Streams(http, options.model)
        await streams.learn(questions)
        first = await engine_of(http)
        busy = load_machine(options.load)
        try:
            end = time.monotonic() + options.seconds
            await asyncio.gather(*(ask_until(streams, questions, end, tally) for _ in range(options.streams)))
            print(f"load {os.getloadavg()[0]:.1f}: the engine was {'not ' * (await engine_of(http) == first)}killed")
            stopped = asyncio.Event()
            asking = [asyncio.create_task(ask_on(streams, questions, stopped, tally)) for _ in range(options.streams)]
            for _ in range(options.stops):
                await asyncio.sleep(options.every)
                print(
                    f"load {os.getloadavg()[0]:.1f}: a stopped engine was replaced after {await replaced(http):.1f} s"
                )
            stopped.set()
            await asyncio.gather(*asking)
        finally:
            for process in busy:
                process.kill()
                process.wait()
    return tally


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load", type=float, default=4.0, help="busy processes for each processor")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which no engine may be killed")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most")
    parser.add_argument("--stops", type=int, default=3, help="engines that are stopped")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two of them")
    options, more = parser.parse_known_args()
    port = free_port()
    server = await serve(options.model, port, more)
    try:
        tally = await measure(options, f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        await server.wait()
    print(f"{tally.answers} answers, {len(tally.lost)} lost, {len(tally.different)} different")
    for line in (tally.lost + tally.different)[:5]:
        print(line[:1000])
    return 1 if tally.lost or tally.different else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

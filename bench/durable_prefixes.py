"""Measures prompts on disk with a real server: the time to the first token of a prompt that is computed, that the cache
has, and that the last server had written; and what reading and writing cost other streams.

python bench/durable_prefixes.py --tokens 1510
python bench/durable_prefixes.py --streams 32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import mean, median
from typing import Any

import httpx
from served import until_ready

WINDOW = 2.0  # seconds in which streams are watched
STREAM_TOKENS = 400
FIRST_ID, LAST_ID = 1000, 40000  # token ids of plain text, in any vocabulary


class Client:
    """Asks a server for completions of token ids."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def first_token(self, prompt: Sequence[int], **fields: Any) -> tuple[float, dict[str, Any]]:
        """Returns the seconds to the first token of an answer, and what the server reports about it."""
        began = time.perf_counter()
        first, report = 0.0, {}
        async for event in self._stream(prompt, 2, penstock=True, **fields):
            first = first or time.perf_counter() - began
            report = event.get("penstock") or report
        return first, report["choices"][0]

    async def gaps(self, prompt: Sequence[int], tokens: int, found: list[tuple[float, float]]) -> None:
        """Notes when each token of an answer came, and how long after the one before."""
        last = 0.0
        async for _ in self._stream(prompt, tokens):
            now = time.perf_counter()
            if last:
                found.append((now, now - last))
            last = now

    async def _stream(self, prompt: Sequence[int], tokens: int, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True} | fields
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError((await answer.aread()).decode()[:300])
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    async def metric(self, name: str) -> float:
        """Returns the value of a metric."""
        text = (await self._http.get("/metrics")).text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


@asynccontextmanager
async def server(options: argparse.Namespace, more: Sequence[str]) -> AsyncIterator[Client]:
    """Runs a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = sys.executable, "-m", "penstock", "serve", options.model, "--port", str(port), *more
    process: Process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
    limits = httpx.Limits(max_connections=options.streams + 8)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as http:
            await until_ready(http)
            yield Client(http, options.model)
    finally:
        process.terminate()
        await process.wait()


async def until_written(client: Client, blocks: int) -> None:
    """Waits until so many blocks are on disk."""
    async with asyncio.timeout(60):
        while await client.metric("penstock_kv_disk_blocks") < blocks:
            await asyncio.sleep(0.1)
            await client.first_token([FIRST_ID])  # the engine tells its counts with what it answers


async def first_tokens(options: argparse.Namespace, folder: str) -> bool:
    """Compares the three times to the first token; returns whether they are as they should be."""
    prompts = [random_prompt(seed, options.tokens) for seed in range(options.tries)]
    disk = ["--kv-disk", folder, "--max-wait", "0"]
    async with server(options, disk) as client:
        await client.first_token(random_prompt(10_000, options.tokens))
        computed = [(await client.first_token(prompt))[0] for prompt in prompts]
        device = [(await client.first_token(prompt))[0] for prompt in prompts]
        await until_written(client, (options.tokens - 1) // 16 * options.tries)
    read, reports = [], []
    async with server(options, disk) as client:
        await client.first_token([FIRST_ID])  # as above: the code of a first request is slow, wherever its prompt is
        for prompt in prompts:
            seconds, report = await client.first_token(prompt)
            read.append(seconds)
            reports.append(report)
    for name, times in (("computed", computed), ("cached", device), ("from disk, after a restart", read)):
        print(f"{name:<28} min {min(times) * 1e3:8.1f} ms, median {median(times) * 1e3:8.1f} ms")
    print("the last one:", json.dumps(reports[-1]["cache"]), json.dumps(reports[-1]["seconds"]))
    ratios = min(read) / min(device), min(computed) / min(read)
    print(f"{ratios[0]:.2f} times the time of a cached prompt, {ratios[1]:.1f} times faster than computing")
    return ratios[0] <= 1.5 and ratios[1] >= 15


class Streams:
    """Keeps streams running, and knows the time between two tokens of each at any time."""

    def __init__(self, client: Client, count: int) -> None:
        self._client = client
        self._gaps: list[tuple[float, float]] = []
        self._running = [asyncio.create_task(self._run(seed)) for seed in range(count)]

    async def _run(self, seed: int) -> None:
        while True:
            await self._client.gaps(random_prompt(20_000 + seed, 32), STREAM_TOKENS, self._gaps)

    async def during(self, prompt: Sequence[int], **fields: Any) -> float:
        """Returns the mean time between two tokens from when a prompt is sent until WINDOW seconds after its first
        token. What computing or copying it takes is part of that."""
        began = time.perf_counter()
        await self._client.first_token(prompt, **fields)
        await asyncio.sleep(WINDOW)
        return mean(gap for at, gap in self._gaps if at >= began)

    def stop(self) -> None:
        for task in self._running:
            task.cancel()


async def beside_streams(options: argparse.Namespace, folder: str) -> None:
    """Measures the time between two tokens of other streams: with a prompt that is written to disk against one that is
    not, and with one that is read against one that the cache has, in turn."""
    prompts = [random_prompt(100 + seed, options.tokens) for seed in range(2 * options.tries)]
    disk = ["--kv-disk", folder, "--max-wait", "0"]
    async with server(options, disk) as client:
        streams = Streams(client, options.streams)
        await asyncio.sleep(WINDOW)
        pairs = []
        for prompt, other in zip(prompts[::2], prompts[1::2], strict=True):
            pairs.append((await streams.during(prompt), await streams.during(other, cache_prompt=False)))
        streams.stop()
        report("written", pairs)
        await until_written(client, (options.tokens - 1) // 16 * options.tries)
    async with server(options, disk) as client:
        streams = Streams(client, options.streams)
        await asyncio.sleep(WINDOW)
        pairs = [(await streams.during(prompt), await streams.during(prompt)) for prompt in prompts[::2]]
        streams.stop()
        report("read", pairs)


def report(name: str, pairs: Sequence[tuple[float, float]]) -> None:
    with_disk, without = (median(times) * 1e3 for times in zip(*pairs, strict=True))
    ratio = median(first / second for first, second in pairs)
    print(f"{name:<8} ITL {with_disk:6.2f} ms, otherwise {without:6.2f} ms, median of ratios {ratio:.3f}")


def random_prompt(seed: int, tokens: int) -> list[int]:
    """Returns a prompt that no other seed has."""
    chance = random.Random(seed)
    return [chance.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)]


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1510, help="of a prompt")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--streams", type=int, default=0, help="0: measure the time to the first token alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.streams:
            await beside_streams(options, folder)
            return 0
        return 0 if await first_tokens(options, folder) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

"""Compares a fleet's routing with round robin where prompts share prefixes: three times as many as one cache holds.

    python bench/fleet_prefixes.py

The fleet is `penstock fleet serve` with three replicas. For round robin, three `penstock serve` with the same options
take requests in turn. Each has its threads and a KV cache for three prefixes; all prompts have one of nine. Prints the
mean TTFT, tokens per second and the share of prompt tokens that was cached, for each, and the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from asyncio.subprocess import Process
from contextlib import AsyncExitStack
from statistics import mean
from typing import Any, NamedTuple

import httpx
from served import free_port, until_ready

REPLICAS = 3
BYTES_PER_TOKEN = 46_080  # of SmolLM2's KV cache


class Served(NamedTuple):
    """Holds what came of one request."""

    ttft: float
    tokens: int
    prompt: int
    cached: int


def command(port: int, fleet: bool, options: argparse.Namespace) -> list[str]:
    memory = int(BYTES_PER_TOKEN * options.prefix * (options.held + 1))  # and what is being answered
    kind = (
        ["fleet", "serve", "smollm2", "--replicas", str(REPLICAS), "--name", f"bench-{port}"]
        if fleet
        else ["serve", "smollm2"]
    )
    limits = ["--threads", "1", "--kv-memory", str(memory), "--kv-ram", "0", "--max-len", str(options.prefix + 512)]
    return [sys.executable, "-m", "penstock", *kind, "--port", str(port), *limits, "--log-level", "warning"]


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Returns token ids of prompts: each begins with one of the prefixes and ends with tokens of its own."""
    random.seed(1)
    prefixes = [[random.randrange(1000, 40_000) for _ in range(options.prefix)] for _ in range(REPLICAS * options.held)]
    ends = [[random.randrange(1000, 40_000) for _ in range(16)] for _ in range(options.requests)]
    return [random.choice(prefixes) + end for end in ends]


async def answer(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> Served:
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    begun, first, usage = time.perf_counter(), 0.0, {}
    async with http.stream(
        "POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}
    ) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begun
                usage = json.loads(line[6:]).get("usage") or usage
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return Served(first, usage["completion_tokens"], usage["prompt_tokens"], cached)


async def measure(ports: list[int], options: argparse.Namespace) -> dict[str, float]:
    """Sends all prompts, in turn to each of the ports."""
    async with AsyncExitStack() as stack:
        clients = []
        for port in ports:
            http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600)
            clients.append(await stack.enter_async_context(http))
            await until_ready(http)
        await asyncio.sleep(options.settle)
        turns, free = itertools.cycle(clients), asyncio.Semaphore(options.clients)
        begun = time.perf_counter()

        async def one(http: httpx.AsyncClient, prompt: list[int]) -> Served:
            async with free:
                return await answer(http, prompt, options.tokens)

        served = await asyncio.gather(*(one(next(turns), prompt) for prompt in prompts(options)))
        seconds = time.perf_counter() - begun
    half = served[len(served) // 3 :]  # the first fill the caches
    return {
        "ttft": mean(each.ttft for each in half),
        "tokens/s": sum(each.tokens for each in served) / seconds,
        "cached": sum(each.cached for each in half) / sum(each.prompt for each in half),
    }


async def run(fleet: bool, options: argparse.Namespace) -> dict[str, float]:
    ports = [free_port() for _ in range(1 if fleet else REPLICAS)]
    processes: list[Process] = []
    try:
        for port in ports:
            processes.append(await asyncio.create_subprocess_exec(*command(port, fleet, options)))
        return await measure(ports, options)
    finally:
        for process in processes:
            process.terminate()
            await process.wait()


async def compare(options: argparse.Namespace) -> None:
    ratios: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        fleet, turns = await run(True, options), await run(False, options)
        for name, found in (("fleet", fleet), ("round robin", turns)):
            print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
        ratios.append({"ttft": turns["ttft"] / fleet["ttft"], "tokens/s": fleet["tokens/s"] / turns["tokens/s"]})
    for key in ("ttft", "tokens/s"):
        print(f"{key}: {', '.join(f'{each[key]:.2f}' for each in ratios)} times better than round robin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=1500, help="tokens that prompts share")
    parser.add_argument("--held", type=int, default=3, help="prefixes that one cache holds")
    parser.add_argument("--requests", type=int, default=72)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--settle", type=float, default=1.0, help="seconds after the start")
    asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()

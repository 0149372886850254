"""Counts false refusals and false admissions of real servers on loopback, which it starts for each scenario.

    python bench/admission.py                        all scenarios, about 12 minutes on two cores
    python bench/admission.py burst list --prefix 1024 --max-wait 20

A refusal is false if all admitted requests of the same burst had their first token within the limit; in `targets`, some
have to be refused. An admission is false if the first token came later than the limit. Scenarios:

burst       twice 64 requests over a cached prefix, after long prompts
beside      64 requests over a cached prefix, while long prompts wait
idle        the burst ten seconds later, on the idle server
restart     the same, after the engine process was killed: the next one adopts the cache
sessions    agents whose prompts grow by a few tokens with every turn
list        one request with 200 prompts, on an idle server
drafts      the burst, on a server that drafts
two         the burst to one of two models, while the other computes long prompts
fleet       the burst, through the gateway of a fleet
targets     40 unique prompts at once, with a TTFT target, after bursts over a cached prefix
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from served import running_fleet

from penstock.store import find
from penstock.tools.bench.http import Connection

TARGET = 5  # seconds: the TTFT target of unique prompts
ANSWER = 8  # tokens
CLIENTS, LONG_PROMPTS = 6, 3  # that send long prompts, and how many each sends one after the other
BURST = 64
TOKENS = range(1000, 40_000)  # of random prompts


@dataclass
class Asked:
    """Records what became of one request."""

    seconds: float  # to its first token, or to the refusal
    refusal: str = ""  # the message; empty: it was admitted


@dataclass
class Server:
    """Is a server that runs, with the models that it serves and the process id of its only engine."""

    url: str
    model: str
    other: str = ""
    engine: int = 0

    async def ask(self, prompt: Sequence[Any], model: str = "", **fields: Any) -> Asked:
        """Sends prompts as tokens, and reads all of the answer."""
        body = {"model": model or self.model, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True}
        began, first = time.perf_counter(), 0.0
        async with Connection(f"{self.url}/v1/completions") as connection:
            response = await connection.ask("POST", body | {"stream": True} | fields)
            if response.status != 200:
                error = (await response.json())["error"]
                return Asked(time.perf_counter() - began, f"{response.status}: {error['message']}")
            async for _ in response.events():
                first = first or time.perf_counter()
        return Asked(first - began)

    async def together(self, prompts: Sequence[Sequence[int]], **fields: Any) -> list[Asked]:
        """Sends prompts at once, each in a request of its own."""
        return await asyncio.gather(*[self.ask(prompt, **fields) for prompt in prompts])

    async def long_phase(self, tokens: int, model: str = "") -> list[Asked]:
        """Sends long prompts that have nothing in common, some at once."""

        async def client() -> list[Asked]:
            return [await self.ask(unique(tokens), model) for _ in range(LONG_PROMPTS)]

        asked = await asyncio.gather(*[client() for _ in range(CLIENTS)])
        return [each for one in asked for each in one]

    async def burst(self, prefix: Sequence[int]) -> list[Asked]:
        """Sends requests over one prefix at once."""
        return await self.together([[*prefix, *unique(16)] for _ in range(BURST)])


def unique(tokens: int) -> list[int]:
    """Returns a prompt that no other begins with."""
    return random.choices(TOKENS, k=tokens)


@dataclass
class Recipe:
    """Says how long prompts are, and how many seconds requests may wait."""

    tokens: int
    max_wait: int


@asynccontextmanager
async def serving(recipe: Recipe, *models: str, options: Sequence[str] = ()) -> AsyncIterator[Server]:
    """Runs `penstock serve` on a free port."""
    more = ("--port", "0", "--log-level", "warning", "--max-wait", str(recipe.max_wait), *options)
    command = [sys.executable, "-m", "penstock", "serve", *models, *more]
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if found := re.search(r"on (http://[^\s;]+)(?: \(engine process (\d+)\))?", line.decode()):
                break
        else:
            raise SystemExit("the server did not start")
        reading = asyncio.create_task(process.stderr.read())
        yield await server_at(found[1], int(found[2] or 0))
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


async def server_at(url: str, engine: int = 0) -> Server:
    """Asks a server for the names of its models."""
    async with httpx.AsyncClient(base_url=url) as http:
        names = [each["id"] for each in (await http.get("/v1/models")).json()["data"]]
    return Server(url, names[0], names[-1], engine)


def report(name: str, asked: Sequence[Asked], limit: float, *, overload: bool = False) -> None:
    """Prints the false decisions about a burst. Under overload, some refusals are right."""
    refused = [each for each in asked if each.refusal]
    admitted = [each.seconds for each in asked if not each.refusal]
    late = sum(seconds > limit for seconds in admitted)
    false = 0 if late or overload else len(refused)
    slowest = max(admitted, default=0.0)
    load = os.getloadavg()[0]
    print(f"{name:9} {len(asked):4} sent, {false:3} refused falsely, {late:3} admitted falsely; ", end="")
    print(f"{len(refused)} refused in all, slowest first token {slowest:.1f} s of {limit:g} s (load {load:.1f})")
    if refused:
        print(f"          {refused[0].refusal}")
    sys.stdout.flush()


async def after_long_prompts(server: Server, recipe: Recipe) -> list[int]:
    """Has a server learn from long prompts how fast it is; returns a prefix that it has cached."""
    prefix = unique(recipe.tokens)
    await server.ask(prefix)
    await server.long_phase(recipe.tokens)
    await server.ask(prefix)
    return prefix


async def bursts(name: str, server: Server, prefix: Sequence[int], limit: float) -> None:
    report(name, [*await server.burst(prefix), *await server.burst(prefix)], limit)


async def burst(recipe: Recipe) -> None:
    async with serving(recipe, "smollm2") as server:
        await bursts("burst", server, await after_long_prompts(server, recipe), recipe.max_wait)


async def beside(recipe: Recipe) -> None:
    async with serving(recipe, "smollm2") as server:
        prefix = await after_long_prompts(server, recipe)
        waiting = asyncio.create_task(server.long_phase(recipe.tokens))
        await asyncio.sleep(2.0)
        report("beside", await server.burst(prefix), recipe.max_wait)
        await waiting


async def idle(recipe: Recipe) -> None:
    async with serving(recipe, "smollm2") as server:
        prefix = await after_long_prompts(server, recipe)
        await asyncio.sleep(10.0)
        await bursts("idle", server, prefix, recipe.max_wait)


async def restart(recipe: Recipe) -> None:
    async with serving(recipe, "smollm2") as server:
        prefix = await after_long_prompts(server, recipe)
        os.kill(server.engine, signal.SIGKILL)
        await bursts("restart", server, prefix, recipe.max_wait)


async def sessions(recipe: Recipe) -> None:
    """Runs 24 agents. Each extends its own prompt eight times."""
    async with serving(recipe, "smollm2") as server:
        prompts = [unique(recipe.tokens // 2) for _ in range(24)]
        for prompt in prompts:
            await server.ask(prompt)
        await server.long_phase(recipe.tokens)
        asked: list[Asked] = []

        async def agent(prompt: list[int]) -> None:
            for _ in range(8):
                prompt = [*prompt, *unique(recipe.tokens // 50)]
                asked.append(await server.ask(prompt))

        await asyncio.gather(*map(agent, prompts))
        report("sessions", asked, recipe.max_wait)


async def prompt_list(recipe: Recipe) -> None:
    async with serving(recipe, "smollm2") as server:
        await server.long_phase(recipe.tokens)
        prompts = [unique(recipe.tokens // 4) for _ in range(200)]
        report("list", [await server.ask(prompts, max_tokens=1, ttft_target_ms=1000 * TARGET)], float("inf"))


async def drafts(recipe: Recipe) -> None:
    async with serving(recipe, "smollm2", options=["--speculation", "4"]) as server:
        await bursts("drafts", server, await after_long_prompts(server, recipe), recipe.max_wait)


async def two(recipe: Recipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/other.gguf"
        entry = find("smollm2")
        assert entry is not None, "run `penstock pull smollm2` first"
        os.symlink(entry.path, path)
        async with serving(recipe, "smollm2", path) as server:
            await server.ask(unique(recipe.tokens), server.other)
            prefix = await after_long_prompts(server, recipe)
            other = asyncio.create_task(server.long_phase(recipe.tokens, server.other))
            await asyncio.sleep(1.0)
            await bursts("two", server, prefix, recipe.max_wait)
            await other


async def fleet(recipe: Recipe) -> None:
    async with running_fleet("smollm2", "--replicas", "1", "--max-wait", str(recipe.max_wait)) as url:
        server = await server_at(url)
        await bursts("fleet", server, await after_long_prompts(server, recipe), recipe.max_wait)


async def targets(recipe: Recipe) -> None:
    async with serving(recipe, "smollm2") as server:
        prefix = unique(recipe.tokens)
        await server.ask(prefix)
        for _ in range(3):
            await server.burst(prefix)
        prompts = [unique(recipe.tokens // 4) for _ in range(40)]
        asked = await server.together(prompts, ttft_target_ms=1000 * TARGET)
        report("targets", asked, TARGET, overload=True)


SCENARIOS: dict[str, Callable[[Recipe], Coroutine[Any, Any, None]]] = {
    each.__name__.removeprefix("prompt_"): each
    for each in (burst, beside, idle, restart, sessions, prompt_list, drafts, two, fleet, targets)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[[], *SCENARIOS], default=[])
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of the cached prefix and of long prompts")
    parser.add_argument("--max-wait", type=int, default=60, help="seconds that requests without a target may wait")
    args = parser.parse_args()
    random.seed(1)
    for scenario in args.scenarios or SCENARIOS:
        asyncio.run(SCENARIOS[scenario](Recipe(args.prefix, args.max_wait)))


if __name__ == "__main__":
    main()

"""Measures what it takes to read a prompt's KV blocks from another engine process, against computing them, and what
comes of it for streams beside long prompts: every one has its own replica that computes it, or they share one.

python bench/block_pulls.py pull --tokens 1000
python bench/block_pulls.py split --prompts 8
python bench/block_pulls.py split --hits
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

from penstock.config import Config
from penstock.fleet.client import FleetClient
from penstock.fleet.directory import Directory, ReplicaInfo, ReplicaState
from penstock.fleet.split import SplitOptions
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.process import EngineProcess
from penstock.ipc.spawn import ProcessClient
from penstock.store.store import fetch
from penstock.types import BlockOffer, Claim, Finished, Report, Request, SamplingParams, Tokens
from penstock.types.messages import Offer

FIRST_ID, LAST_ID = 1000, 40000  # token ids of plain text
KV_MEMORY, KV_RAM = 96 << 20, 64 << 20  # bytes: little, so that all of it was used before a pull is timed
WARM = 7  # prompts until then
LONG, STREAMS = 1200, 6  # tokens of a long prompt, streams beside them
EVERY = 3.0  # a long prompt comes each time that computing so many of them takes
CARRIERS = {"shm": "shm", "tcp": "tcp:127.0.0.1:0", "nixl": "nixl:127.0.0.1:0"}


class Timed(NamedTuple):
    """Is a request's answer of one token: milliseconds, tokens, and what the engine reports."""

    ms: float
    token: int
    report: Report


class Pulled(NamedTuple):
    """Holds the milliseconds of one prompt."""

    compute: float  # on the first engine
    offer: float
    wait: float  # for blocks, as the second engine reports it
    answer: float  # of the second engine, with the wait and the last block's step
    cached: float  # the same once it has them: what a pull costs is the difference


async def answer(client: ProcessClient, prompt: Sequence[int], pull: BlockOffer | None = None) -> Timed:
    """Asks for one token."""
    request = Request(client.next_id(), tuple(prompt), SamplingParams(temperature=0), 1, pull=pull)
    began, tokens = time.perf_counter(), []
    async for events in client.submit(request):
        tokens += [token for event in events for token in getattr(event, "tokens", ())]
        if isinstance(events[-1], Finished) and events[-1].report is not None:
            return Timed(1e3 * (time.perf_counter() - began), tokens[0], events[-1].report)
    raise RuntimeError("the engine did not answer")


async def pull(first: ProcessClient, second: ProcessClient, prompt: Sequence[int]) -> Pulled:
    """Computes a prompt on one engine, has another read it, and sees that both answer the same."""
    computed = await answer(first, prompt)
    began = time.perf_counter()
    offer = (await first.ask(Offer(prompt))).offer
    offered = 1e3 * (time.perf_counter() - began)
    assert offer is not None, "nothing was offered"
    read = await answer(second, prompt, offer)
    again = await answer(second, prompt)
    assert read.token == again.token == computed.token, "the answers differ"
    assert dict(read.report.reused).get("peer", 0) >= len(prompt) - 32, f"reused {read.report.reused}"
    return Pulled(computed.ms, offered, 1e3 * dict(read.report.waited)["peer"], read.ms, again.ms)


async def measure(config: Config, carrier: str, tokens: int, times: int) -> None:
    """Prints the least and the median of some pulls between two engines."""
    clients = [ProcessClient(config_with(config, carrier)) for _ in range(2)]
    draw = random.Random(1)
    try:
        for client in clients:
            await client.start()
        prompts = [[draw.randrange(FIRST_ID, LAST_ID) for _ in range(tokens)] for _ in range(WARM + times)]
        found = [await pull(*clients, prompt) for prompt in prompts][WARM:]
    finally:
        for client in clients:
            await client.close()
    total = [each.offer + each.answer - each.cached for each in found]
    for name, choose in (("least", min), ("median", median)):
        compute, offer, wait = (choose(each[at] for each in found) for at in range(3))
        print(
            f"{carrier:4} {name:6} {choose(total):7.1f} ms for {tokens:,} tokens: {offer:.1f} to offer, {wait:.1f} to "
            f"read; {compute:.0f} ms to compute, {compute / choose(total):.0f}x"
        )


def config_with(config: Config, carrier: str) -> Config:
    """Returns the config of an engine that offers blocks."""
    return replace(config, offers=(CARRIERS[carrier],))


# -- split -------------------------------------------------------------------------------------------------------


class Engines:
    """Is the directory of a few engines that are started once."""

    secret = "of the benchmark"

    def __init__(self, config: Config, count: int) -> None:
        self._config = replace(config, listen="ipc://*", secret=self.secret)
        self._count = count
        self._engines: list[EngineProcess] = []

    async def start(self) -> Directory:
        launcher = SpawnLauncher()
        self._engines = [await EngineProcess.launch(launcher, self._config) for _ in range(self._count)]
        hellos = [engine.hello for engine in self._engines]
        infos = [
            ReplicaInfo(f"engine-{at}", hello.address, hello.pid, hello.epoch, ReplicaState.READY)
            for at, hello in enumerate(hellos)
        ]
        return Directory(1, tuple(infos))

    async def changes(self) -> AsyncIterator[Directory]:
        await asyncio.Event().wait()
        yield Directory(2, ())

    async def close(self) -> None:
        await asyncio.gather(*(engine.end(5) for engine in self._engines))


class Watched:
    """Notes what came of a load. Its requests have an ITL target in milliseconds; 0: they have none."""

    def __init__(self, itl_ms: float = 0.0) -> None:
        self._claim = Claim(itl=itl_ms / 1e3 or None)
        self.gaps: list[float] = []  # milliseconds between two tokens of a short answer
        self.tokens = 0  # generated, or of long prompts
        self.firsts: list[float] = []  # milliseconds to the first token after a long prompt

    async def stream(self, client: FleetClient, prompt: Sequence[int], tokens: int, long: bool) -> None:
        """Answers a prompt and notes when its tokens came."""
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        request = Request(client.next_id(), tuple(prompt), sampling, tokens, claim=self._claim)
        last = began = time.perf_counter()
        first = True
        async for events in client.submit(request):
            now = time.perf_counter()
            count = sum(len(event.tokens) for event in events if isinstance(event, Tokens))
            self.tokens += count
            if first and long and count:
                self.firsts.append(1e3 * (now - began))
                self.tokens += len(prompt)
            elif not first and not long and count:
                self.gaps += [1e3 * (now - last) / count] * count
            first, last = first and not count, now


async def load(client: FleetClient, watched: Watched, seconds: float, every: float, hits: bool) -> None:
    """Keeps some streams going beside long prompts that come at fixed times. With `hits`, nine tenths of them are
    known."""
    draw, end = random.Random(3), time.perf_counter() + seconds
    known = [draw.randrange(FIRST_ID, LAST_ID) for _ in range(LONG * 9 // 10)]

    async def short(number: int) -> None:
        while time.perf_counter() < end:
            prompt = [FIRST_ID + number, *(draw.randrange(FIRST_ID, LAST_ID) for _ in range(8))]
            await watched.stream(client, prompt, 64, long=False)

    async def long() -> None:
        asked = []
        while time.perf_counter() < end:
            begin = known if hits else []
            prompt = [*begin, *(draw.randrange(FIRST_ID, LAST_ID) for _ in range(LONG - len(begin)))]
            asked.append(asyncio.create_task(watched.stream(client, prompt, 8, long=True)))
            await asyncio.sleep(every)
        await asyncio.gather(*asked)

    await asyncio.gather(*(short(number) for number in range(STREAMS)), long())


async def alone(client: FleetClient) -> float:
    """Returns the seconds that a long prompt takes while nothing else runs."""
    draw, watched = random.Random(4), Watched()
    for _ in range(3):
        prompt = [draw.randrange(FIRST_ID, LAST_ID) for _ in range(LONG)]
        await watched.stream(client, prompt, 1, long=True)
    return min(watched.firsts) / 1e3


async def compare(config: Config, prompts: int, hits: bool, itl_ms: float) -> None:
    """Prints what streams see with and without a split, in turn, and where engines know the target, as they do behind
    `penstock fleet serve`."""
    ways = (
        ("unsplit", SplitOptions(), 0.0),
        ("split", SplitOptions(itl_ms), 0.0),
        ("told", SplitOptions(itl_ms, told=True), itl_ms),
    )
    for turn in range(2):
        for name, split, target in ways:
            client = FleetClient(Engines(config, 2), split=split)
            await client.start()
            try:
                while len(client.replicas) < 2 or any(info.state != "ready" for info in client.replicas):
                    await asyncio.sleep(0.01)
                every = EVERY * await alone(client)
                await load(client, Watched(target), every, every, hits)
                watched, began = Watched(target), time.perf_counter()
                await load(client, watched, prompts * every, every, hits)
                rate = watched.tokens / (time.perf_counter() - began)
            finally:
                await client.close()
            gaps, peers = sorted(watched.gaps), client.stats.peers
            print(
                f"{turn} {name:8} a prompt of {LONG:,} every {every:.1f} s; "
                f"ITL p50 {gaps[len(gaps) // 2]:.0f} p99 {gaps[len(gaps) * 99 // 100]:.0f} ms; "
                f"TTFT of long prompts {median(watched.firsts):.0f} ms; {rate:.0f} tokens/s; {peers.pulls} pulls, "
                f"{dict(client.fleet_figures.decisions['splits'])}, failures {dict(peers.failures)}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("pull", "split"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--carriers", nargs="*", choices=CARRIERS, default=[], help="those alone")
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=8, help="long ones")
    parser.add_argument("--hits", action="store_true", help="nine tenths of each long prompt are known")
    parser.add_argument("--itl", type=float, default=40.0, help="target in milliseconds")
    options = parser.parse_args()
    common = {"model": str(fetch(options.model)), "threads": options.threads, "device": "cpu", "speculation": "off"}
    if options.what == "split":
        asyncio.run(compare(Config(**common, kv_memory=1 << 29), options.prompts, options.hits, options.itl))
        return
    sizes = {"kv_memory": KV_MEMORY, "kv_ram": str(KV_RAM), "max_len": 2 * options.tokens}
    for carrier in options.carriers or CARRIERS:
        if carrier == "nixl" and find_spec("nixl") is None:
            print("nixl is not installed: pip install --no-deps nixl nixl-cu12")
            continue
        asyncio.run(measure(Config(**common, **sizes), carrier, options.tokens, options.times))


if __name__ == "__main__":
    main()

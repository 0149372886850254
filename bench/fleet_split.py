"""Measures streams beside long prompts with and without a split, over HTTP: `python bench/fleet_split.py`.

Two engines with one thread each answer some streams all the time, while prompts of several thousand tokens come at
fixed times. The ways are tried in turn, each with a `penstock fleet serve` of its own:

    plain    engines know no target
    itl      engines know a target for the ITL, and keep it
    both     long prompts also have a target for the TTFT, which they miss unless they are computed elsewhere
    roles    one engine computes all long prompts

With `--hits`, nine tenths of each long prompt are cached, and no prompt should be computed elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from itertools import pairwise
from statistics import median

import httpx
from quiet import Clock, adopt_orphans, others_since, reap_orphans, wait_for_quiet
from served import running_fleet

from penstock.errors import EngineUnavailable
from penstock.tools.bench.load import RequestTiming, run
from penstock.tools.bench.targets import UrlTarget

ENGINES = ("--replicas", "2", "--threads", "1", "--max-len", "8192", "--speculation", "off", "--max-wait", "0")
SHORT, ANSWER = 9, 64  # tokens of a stream's prompt, and of its answer
QUIET, PATIENCE = 0.1, 60.0  # share of the processors that others may have at the start, and seconds to wait for it
LONG_ANSWER = 8  # tokens that follow a long prompt


class HurriedTarget(UrlTarget):
    """Sends requests that have a target for the TTFT, in milliseconds."""

    def __init__(self, url: str, ttft_ms: float) -> None:
        super().__init__(url)
        self._ttft_ms = ttft_ms

    async def negotiate(self) -> None:
        await super().negotiate()
        self._extras = self._extras | {"ttft_target_ms": round(self._ttft_ms)}


class Load:
    """Sends streams and long prompts, and keeps their times."""

    def __init__(self, target: UrlTarget, long_target: UrlTarget, options: argparse.Namespace) -> None:
        self._target, self._long_target, self._options = target, long_target, options
        self._random = random.Random(options.seed)
        self._known = self._tokens(options.tokens * 9 // 10 if options.hits else 0)
        self.streams: list[RequestTiming] = []
        self.prompts: list[RequestTiming] = []
        self.refused = 0  # long prompts that would have missed their target

    async def run(self, prompts: int) -> float:
        """Sends so many long prompts beside streams; returns the seconds until all were answered."""
        self.streams, self.prompts, self.refused = [], [], 0
        begun, long = time.perf_counter(), asyncio.create_task(self._long(prompts))
        await asyncio.gather(long, *(self._stream(long) for _ in range(self._options.streams)))
        return time.perf_counter() - begun

    async def _long(self, count: int) -> None:
        options, asked = self._options, []
        for _ in range(count):
            prompt = self._known + self._tokens(options.tokens - len(self._known))
            asked.append(asyncio.create_task(self._ask(prompt)))
            await asyncio.sleep(options.every)
        await asyncio.gather(*asked)

    async def _ask(self, prompt: list[int]) -> None:
        timing = RequestTiming()
        try:
            await self._long_target.complete(prompt, LONG_ANSWER, timing)
            self.prompts.append(timing)
        except EngineUnavailable:
            self.refused += 1

    async def _stream(self, beside: asyncio.Task[None]) -> None:
        while not beside.done():
            self.streams.append(timing := RequestTiming())
            await self._target.complete(self._tokens(SHORT), ANSWER, timing)

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(self._target.vocab, k=count)


async def decisions(http: httpx.AsyncClient) -> dict[str, int]:
    """Returns why prompts were computed elsewhere or not, with counts."""
    found = re.findall(
        r'^penstock_fleet_splits_total\{.*reason="(\w+)".*\} (\S+)', (await http.get("/metrics")).text, re.M
    )
    return {reason: int(float(count)) for reason, count in found if float(count)}


async def measure(way: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """Returns the p99 of the ITL, the median TTFT of long prompts and the tokens per second of one way."""
    more = {
        "plain": (),
        "itl": ("--itl", f"{options.itl:g}"),
        "both": ("--itl", f"{options.itl:g}"),
        "roles": ("--itl", f"{options.itl:g}", "--roles", "prefill=1"),
    }
    async with running_fleet(options.model, *ENGINES, *more[way]) as url, httpx.AsyncClient(base_url=url) as http:
        target = UrlTarget(f"{url}/v1")
        long_target = HurriedTarget(f"{url}/v1", options.ttft) if way == "both" else target
        for each in (target, long_target):
            await each.negotiate()
        load = Load(target, long_target, options)
        await load.run(options.warm)
        before = await decisions(http)
        seconds = await load.run(options.prompts)
        after = await decisions(http)
    gaps = sorted(1000 * (late - early) for each in load.streams for early, late in pairwise(each.arrivals))
    firsts = [1000 * (each.arrivals[0] - each.started) for each in load.prompts]
    made = sum(each.output_tokens for each in load.streams + load.prompts)
    rate = (made + sum(each.prompt_tokens for each in load.prompts)) / seconds
    changed = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    p99 = gaps[len(gaps) * 99 // 100]
    print(
        f"{way:6} ITL p50 {gaps[len(gaps) // 2]:.1f}, p99 {p99:.1f}, most {gaps[-1]:.0f} ms; TTFT of long prompts "
        f"{median(firsts):.0f} ms, most {max(firsts):.0f}; {rate:.0f} tokens/s, {made / seconds:.0f} of answers, in "
        f"{seconds:.0f} s; {load.refused} refused, {changed}",
        flush=True,
    )
    return p99, median(firsts), rate


async def compare(options: argparse.Namespace) -> None:
    adopt_orphans()
    wait_for_quiet(QUIET, PATIENCE)
    start = Clock.now()
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            found[way].append(await measure(way, options))
    reap_orphans()
    print(f"others had {others_since(start):.0%} of the processors")
    first = options.ways[0]
    for way in options.ways[1:]:
        pairs = zip(found[way], found[first], strict=True)
        ratios = [tuple(mine / other for mine, other in zip(*pair, strict=True)) for pair in pairs]
        itl, ttft, rate = (median(each[at] for each in ratios) for at in range(3))
        print(f"{way} against {first}: ITL p99 {itl:.2f}x, TTFT {ttft:.2f}x, tokens/s {rate:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=["plain", "itl", "both"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=3000, help="of a long prompt")
    parser.add_argument("--every", type=float, default=4.0, help="seconds from one long prompt to the next")
    parser.add_argument("--prompts", type=int, default=6, help="long ones that are measured")
    parser.add_argument("--warm", type=int, default=3, help="long ones before that")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--itl", type=float, default=40.0, help="target in milliseconds")
    parser.add_argument("--ttft", type=float, default=4000.0, help="target in milliseconds")
    parser.add_argument("--hits", action="store_true", help="nine tenths of each long prompt are cached")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()

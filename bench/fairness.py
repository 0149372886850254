"""Measures fair shares, targets and overload over HTTP, on loopback, with a server that it starts for each part.

    python bench/fairness.py                         all parts, about 6 minutes
    python bench/fairness.py light itl --seconds 20  some of them, shorter

Parts: light (a client beside one with 256 requests queued), shares (two busy keys, 1:1 and 3:1), throughput (two keys
against one, which is first come, first served), itl (a 4,000-token prompt beside running streams), short (a key's
short prompts beside its own of 4,000 tokens), overload (three times what the server can do).
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from penstock.keys import Key, changing, digest, new_key, now
from penstock.tools.bench.http import Connection

KV_BYTES = 400_000_000  # of a server whose memory is watched: its prefix cache is full after some seconds
WORDS = ("river", "stone", "paper", "cloud", "engine", "garden", "window", "silver", "number", "market", "winter")


@dataclass
class Sent:
    """Records one request: when it was sent and when its tokens came, in seconds."""

    sent: float
    status: int = 0
    answered: float = 0.0  # when the response's head came
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.sent if self.tokens else float("inf")


class Server:
    """Runs `penstock serve` with three keys: a and b, and heavy with three times their weight."""

    def __init__(self, model: str, options: Sequence[str]) -> None:
        self._model, self._options = model, options
        self._folder = tempfile.TemporaryDirectory()
        self.keys: dict[str, str] = {}

    async def __aenter__(self) -> Server:
        file = Path(self._folder.name) / "keys.json"
        with changing(file) as keys:
            for name, weight in (("a", 1.0), ("b", 1.0), ("heavy", 3.0)):
                self.keys[name] = new_key()
                keys.append(Key(name=name, sha256=digest(self.keys[name].encode()), created=now(), weight=weight))
        command = [sys.executable, "-m", "penstock", "serve", self._model, "--port", "0", "--keys", str(file)]
        self._process = subprocess.Popen(
            [*command, "--log-level", "warning", *self._options], stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"on (http://\S+) \(engine process (\d+)\)", line):
                self.url, self._engine = found[1], int(found[2])
                break
        else:
            raise SystemExit("the server did not start")
        asyncio.get_running_loop().run_in_executor(None, self._process.stderr.read)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.terminate()
        await asyncio.to_thread(self._process.wait)
        self._folder.cleanup()

    def megabytes(self) -> float:
        """Returns the resident memory of the server and its engine."""
        sizes = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in (self._process.pid, self._engine)]
        return sum(map(int, sizes)) * os.sysconf("SC_PAGE_SIZE") / 1e6

    async def ask(self, key: str, prompt: int, answer: int, sent: Sent | None = None) -> Sent:
        """Sends a prompt of about so many tokens and reads so many tokens of its answer. What comes is recorded in
        `sent` as it comes."""
        sent = sent or Sent(time.perf_counter())
        async with Connection(f"{self.url}/v1/completions", self.keys[key]) as connection:
            response = await connection.ask("POST", body_of(prompt, answer))
            sent.status, sent.answered = response.status, time.perf_counter()
            if response.status == 200:
                async for event in response.events():
                    if event["choices"]:
                        sent.tokens.append(time.perf_counter())
        return sent


def body_of(prompt: int, answer: int) -> dict[str, object]:
    """Returns the request of a prompt of about so many tokens for so many tokens of its answer. Each token has an
    event, also one that is only a part of a character."""
    words = " ".join(random.choice(WORDS) for _ in range(prompt - 1))
    stream = {"stream": True, "return_token_ids": True}
    return {"prompt": words, "max_tokens": answer, "ignore_eos": True, "temperature": 1, **stream}


def refusals(url: str, key: str, seconds: float) -> list[float]:
    """Returns the seconds to each refusal of requests that are sent one by one. It runs in a process of its own: one
    that also reads dozens of streams would measure how long it is busy with those."""
    until, found = time.perf_counter() + seconds, []
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    while time.perf_counter() < until:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body_of(64, 32)), headers)
        if connection.getresponse().status in (429, 503):
            found.append(time.perf_counter() - began)
        connection.close()  # an answer is of no interest
        time.sleep(0.05 * random.random())
    return found


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


@asynccontextmanager
async def busy(work: Callable[[], Awaitable[object]], count: int) -> AsyncIterator[None]:
    """Keeps so many loops of `work` running."""

    async def loop() -> None:
        while True:
            await work()

    tasks = [asyncio.create_task(loop()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def light(model: str, seconds: float) -> None:
    """Compares the first tokens of a light client alone and beside one that always has 256 requests queued."""
    async with Server(model, ["--max-wait", "0"]) as server:
        await server.ask("a", 64, 8)
        alone = [(await server.ask("b", 64, 4)).ttft for _ in range(20)]
        beside: list[float] = []
        gaps: list[float] = []
        streams: deque[Sent] = deque(maxlen=512)

        async def greedy() -> None:
            streams.append(sent := Sent(time.perf_counter()))
            await server.ask("a", 64, 64, sent)

        async with busy(greedy, 256):
            await asyncio.sleep(min(seconds / 3, 8))
            until = time.perf_counter() + seconds
            while time.perf_counter() < until and len(beside) < 60:
                beside.append((await server.ask("b", 64, 4)).ttft)
                await asyncio.sleep(random.random() / 2)
            gaps = [one - other for sent in streams for one, other in zip(sent.tokens[1:], sent.tokens, strict=False)]
        step = percentile(gaps, 0.5)
        first, other = percentile(alone, 0.95), percentile(beside, 0.95)
        print(f"light: TTFT p95 alone {first * 1e3:.0f} ms, beside 256 {other * 1e3:.0f} ms ({len(beside)} requests);")
        print(f"       1.5 x alone + a step of {step * 1e3:.0f} ms = {(1.5 * first + step) * 1e3:.0f} ms")


async def shares(model: str, seconds: float) -> None:
    """Gives two keys more than the server can do, and looks at their work in any 10 seconds."""
    async with Server(model, ["--max-wait", "0"]) as server:
        for other, weight in (("b", 1.0), ("heavy", 3.0)):
            work: list[tuple[float, str, int]] = []

            async def one(key: str, work: list[tuple[float, str, int]] = work) -> None:
                prompt = random.randint(32, 128)
                sent = await server.ask(key, prompt, random.randint(16, 64))
                work += [(at, key, 2) for at in sent.tokens]
                work.append((sent.tokens[0], key, prompt))

            async with busy(lambda: one("a"), 96), busy(lambda other=other: one(other), 96):  # type: ignore[misc]
                await asyncio.sleep(seconds + 15)
            end = max(at for at, _, _ in work) - 5
            worst = 0.0
            for start in range(int(end - seconds), int(end - 10)):
                window = [(key, amount) for at, key, amount in work if start <= at < start + 10]
                mine = sum(amount for key, amount in window if key == "a") / max(sum(w for _, w in window), 1)
                worst = max(worst, abs(mine * (1 + weight) - 1))
            print(f"shares 1:{weight:g}: over any 10 s the share of key a is within {worst:.1%} of its own")


async def throughput(model: str, seconds: float) -> None:
    """Compares the tokens per second of two keys in turn with those of one, which is served first come, first
    served."""
    async with Server(model, ["--max-wait", "0"]) as server:
        rates: dict[str, list[float]] = {"one": [], "two": []}
        for _ in range(2):
            for case, keys in (("one", ("a", "a")), ("two", ("a", "b"))):
                tokens: list[float] = []

                async def ask(key: str, tokens: list[float] = tokens) -> None:
                    tokens += (await server.ask(key, 64, 48)).tokens

                async with busy(lambda key=keys[0]: ask(key), 48), busy(lambda key=keys[1]: ask(key), 48):  # type: ignore[misc]
                    await asyncio.sleep(seconds / 2)
                later = [at for at in tokens if at > min(tokens) + 2]
                rates[case].append(len(later) / (max(later) - min(later)))
        best = {case: max(found) for case, found in rates.items()}
        print(
            f"throughput: {best['two']:.0f} tokens/s with two keys, {best['one']:.0f} first come, first served: ",
            end="",
        )
        print(f"{best['two'] / best['one']:.3f}")


async def itl(model: str, seconds: float) -> None:
    """Looks at the time between tokens of four streams while prompts of 4,000 tokens come, with the usual target and
    with another."""
    for options in ([], ["--itl-target", "50"]):
        async with Server(model, [*options, "--max-len", "8192"]) as server:
            await server.ask("b", 1500, 64)
            streams = [Sent(time.perf_counter()) for _ in range(4)]
            tasks = [asyncio.create_task(server.ask("a", 32, 4000, sent)) for sent in streams]
            await asyncio.sleep(2)
            began, first = time.perf_counter(), []
            while len(first) < 2 or time.perf_counter() < began + seconds / 4:
                first.append((await server.ask("b", 4000, 4)).ttft)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            pairs = [pair for sent in streams for pair in zip(sent.tokens[1:], sent.tokens, strict=False)]
            gaps = [one - other for one, other in pairs if one > began]
            p50, p99 = percentile(gaps, 0.5) * 1e3, percentile(gaps, 0.99) * 1e3
            name = " ".join(options) or "the usual target"
            print(f"itl, {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {max(gaps) * 1e3:.1f} ms; ", end="")
            print(f"TTFT of the prompts {percentile(first, 0.5):.2f} s", flush=True)


async def short(model: str, seconds: float) -> None:
    """Sends short prompts while prompts of 4,000 tokens of the same key come, two at a time."""
    async with Server(model, ["--max-len", "8192"]) as server:
        alone = [(await server.ask("a", 32, 4)).ttft for _ in range(8)]
        await server.ask("a", 4000, 4)
        long: list[Sent] = []

        async def ask_long() -> None:
            long.append(await server.ask("a", 4000, 4))

        async with busy(ask_long, 2):
            began, first = time.perf_counter(), []
            while len(first) < 8 or len(long) < 4 or time.perf_counter() < began + seconds / 2:
                first.append((await server.ask("a", 32, 4)).ttft)
    p50, p95 = (percentile(first, share) * 1e3 for share in (0.5, 0.95))
    print(f"short: TTFT alone {percentile(alone, 0.5) * 1e3:.0f} ms, beside long prompts p50 {p50:.0f} ms, ", end="")
    print(f"p95 {p95:.0f} ms ({len(first)}); of the long ones p50 {percentile([s.ttft for s in long], 0.5):.2f} s")


async def overload(model: str, seconds: float) -> None:
    """Sends three times what the server can do, at random times, and looks at what becomes of it."""
    target = 2.0
    options = ["--ttft-target", f"{1000 * target:g}", "--kv-memory", str(KV_BYTES)]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as prober:
        async with Server(model, options) as server:
            capacity = await capacity_of(server)
            probed = asyncio.get_running_loop().run_in_executor(prober, refusals, server.url, server.keys["a"], seconds)
            done, sizes = await sent_at_random(server, 3 * capacity, seconds)
            recovered = (await server.ask("a", 64, 4)).ttft
            refused = await probed
    accepted = [sent.ttft for sent in done if sent.status == 200]
    met = sum(ttft <= target for ttft in accepted) / max(len(accepted), 1)
    early = sizes[min(20, len(sizes) // 3)]
    print(
        f"overload: capacity {capacity:.1f}/s, {len(done)} sent in {seconds:.0f} s, {len(accepted)} accepted, ", end=""
    )
    print(f"{met:.1%} of them within {target:g} s (p95 {percentile(accepted, 0.95):.2f} s); refusals p50 ", end="")
    print(", p95 ".join(f"{percentile(refused, share) * 1e3:.1f} ms" for share in (0.5, 0.95)), f"({len(refused)});")
    print(
        f"          memory {early:.0f} MB early, {sizes[-1]:.0f} MB at the end; a request after it has its first ",
        end="",
    )
    print(f"token in {recovered * 1e3:.0f} ms")


async def capacity_of(server: Server) -> float:
    """Returns how many requests a server answers in a second."""
    done: list[Sent] = []

    async def one() -> None:
        done.append(sent := await server.ask("a", 64, 32))
        await asyncio.sleep(0 if sent.status == 200 else 0.5)

    ends: list[float] = []
    async with busy(one, 32):
        while len(ends) < 100 or ends[-1] < ends[0] + 8:
            await asyncio.sleep(1)
            ends = sorted(sent.tokens[-1] for sent in done if sent.tokens)
    return len(ends) / (ends[-1] - ends[0])


async def sent_at_random(server: Server, rate: float, seconds: float) -> tuple[list[Sent], list[float]]:
    """Sends so many requests in a second whatever becomes of them. Returns those, and the server's memory in MB after
    each second."""
    done: list[Sent] = []

    async def one() -> None:
        with suppress(OSError):
            done.append(await server.ask("a", 64, 32))

    tasks: set[asyncio.Task[None]] = set()
    began, sizes = time.perf_counter(), list[float]()
    at = began
    while at < began + seconds:
        at += random.expovariate(rate)
        await asyncio.sleep(max(at - time.perf_counter(), 0))
        tasks.add(task := asyncio.create_task(one()))
        task.add_done_callback(tasks.discard)
        if len(sizes) < int(at - began):
            sizes.append(server.megabytes())
    await asyncio.gather(*tasks)
    return done, sizes


PARTS = {each.__name__: each for each in (light, shares, throughput, itl, short, overload)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=list(PARTS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    args = parser.parse_args()
    for part in args.parts:
        asyncio.run(PARTS[part](args.model, args.seconds))


if __name__ == "__main__":
    main()

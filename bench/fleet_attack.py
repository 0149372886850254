"""Attacks every kind of process of a fleet under load, and compares every answer with the undisturbed one.

    python bench/fleet_attack.py --seconds 900
    python bench/fleet_attack.py --seconds 900 --foreign

Runs `penstock fleet serve smollm2 --replicas 2` on loopback. In each round, streams and whole answers at temperature 0
run while one process gets a signal: an engine, a keeper, the steward or the gateway. After SIGSTOP comes SIGCONT. A
killed gateway is replaced by `penstock fleet gateway`; what it was answering is asked again. With `--foreign` the
engines are `penstock serve` behind a gateway that knows their URLs alone. The exit status is 1 if an answer differs or
fails, or if a process outlives the fleet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from crash import QUESTIONS
from served import READY_SECONDS, free_port, until_ready

ATTACKS = (
    ("engine", "KILL"),
    ("engine", "STOP"),
    ("keeper", "KILL"),
    ("keeper", "STOP"),
    ("steward", "KILL"),
    ("steward", "STOP"),
    ("gateway", "KILL"),
    ("gateway", "STOP"),
)
DISTURBED_AFTER = 0.1, 4.0  # seconds of a round, least and most
STOPPED_SECONDS = 1.0, 9.0  # least and most
ROUND_SECONDS = 180.0  # after which an answer hangs

FOREIGN_ATTACKS = ("engine", "KILL"), ("engine", "STOP"), ("gateway", "KILL"), ("gateway", "STOP")
Answer = tuple[str, str]  # text and finish reason


class Fleet:
    """Runs a fleet and finds its processes."""

    def __init__(self, model: str, replicas: int, more: list[str]) -> None:
        self.port = free_port()
        self.name = f"attack-{self.port}"
        self.seen: dict[int, str] = {}  # processes, with the times at which they began
        self._model, self._replicas, self._more = model, replicas, more
        self._gateway: Process | None = None

    async def start(self) -> None:
        options = ("--replicas", str(self._replicas), "--name", self.name, "--threads", "1", *self._more)
        self._gateway = await self._run("fleet", "serve", self._model, *options)

    async def replace(self, kind: str) -> None:
        """Starts a process in the place of one that was killed, if nobody else does."""
        if kind == "gateway":
            assert self._gateway is not None
            await self._gateway.wait()
            self._gateway = await self._run("fleet", "gateway", self.name)

    async def whole(self, http: httpx.AsyncClient) -> bool:
        """Returns whether all engines can be used."""
        health = (await http.get("/health")).json()
        return all(each["state"] == "ready" for each in health["replicas"])

    async def end(self) -> list[int]:
        """Ends the fleet and returns the processes that outlive it."""
        assert self._gateway is not None
        with suppress(ProcessLookupError):
            self._gateway.terminate()
        await self._gateway.wait()
        end = time.monotonic() + READY_SECONDS
        while (left := [pid for pid, began in self.seen.items() if _began(pid) == began]) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        return left

    async def find(self, kind: str) -> int | None:
        """Returns a process of this kind; None if there is none now."""
        assert self._gateway is not None
        if kind == "gateway":
            return self._gateway.pid
        command = (sys.executable, "-m", "penstock", "fleet", "status", "--fleet", self.name, "--json")
        asking = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
        told, _ = await asking.communicate()
        if asking.returncode:
            return None
        status = json.loads(told)
        found = {"steward": [status["steward"]]}
        found["engine"] = [each["pid"] for each in status["replicas"] if each["state"] == "ready"]
        found["keeper"] = [each["keeper"] for each in status["replicas"] if each["state"] == "ready"]
        self.seen |= {pid: _began(pid) for pids in found.values() for pid in pids if pid and _began(pid)}
        return random.choice(found[kind]) if found[kind] else None

    async def _run(self, *command: str, port: int = 0) -> Process:
        options = ("--port", str(port or self.port), "--log-level", "warning")
        return await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock", *command, *options)


class ForeignFleet(Fleet):
    """Runs engines as servers of their own, and a gateway that knows their URLs."""

    async def start(self) -> None:
        self._ports = [free_port() for _ in range(self._replicas)]
        self._engines = {port: await self._serve(port) for port in self._ports}
        for port in self._ports:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                await until_ready(http)
        self._gateway = await self._run_gateway()

    async def _serve(self, port: int) -> Process:
        return await self._run("serve", self._model, "--threads", "1", *self._more, port=port)

    async def _run_gateway(self) -> Process:
        engines = [word for port in self._ports for word in ("--engine", f"http://127.0.0.1:{port}")]
        return await self._run("fleet", "serve", *engines)

    async def find(self, kind: str) -> int | None:
        if kind == "gateway":
            return await super().find(kind)
        return random.choice([engine.pid for engine in self._engines.values()])

    async def replace(self, kind: str) -> None:
        if kind == "gateway":
            assert self._gateway is not None
            await self._gateway.wait()
            self._gateway = await self._run_gateway()
            return
        while not (ended := [port for port, engine in self._engines.items() if engine.returncode is not None]):
            await asyncio.sleep(0.05)
        self._engines[ended[0]] = await self._serve(ended[0])

    async def whole(self, http: httpx.AsyncClient) -> bool:
        return all(each["state"] == "ready" for each in (await http.get("/health")).json()["engines"])

    async def end(self) -> list[int]:
        for engine in self._engines.values():
            with suppress(ProcessLookupError):
                engine.terminate()
        await asyncio.gather(*(engine.wait() for engine in self._engines.values()))
        return await super().end()


def _began(pid: int) -> str:
    """Returns when a process began, by the system's clock; empty if it does not live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


class Attack:
    """Sends requests while processes are killed and stopped, and counts the results."""

    def __init__(self, fleet: Fleet, http: httpx.AsyncClient, tokens: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._fleet, self._http, self._tokens = fleet, http, tokens
        self._known: dict[tuple[int, bool], Answer] = {}
        self._gateway_died = False  # in this round

    async def learn(self, count: int) -> None:
        """Notes the undisturbed answers, which must be the same streamed and whole, alone and together."""
        for number in range(count):
            for stream in (False, True):
                self._known[number, stream] = await self._ask(number, stream)
            if self._known[number, False] != self._known[number, True]:
                self.wrong.append(f"undisturbed, the stream of question {number} differs from its whole answer")

    async def round(self, count: int, kind: str, name: str) -> None:
        """Asks every question streamed and whole while one process gets a signal."""
        self._gateway_died = (kind, name) == ("gateway", "KILL")
        pid = await self._fleet.find(kind)
        began, slowest = time.monotonic(), 0.0
        asking = [
            asyncio.create_task(self._check(number, stream)) for number in range(count) for stream in (False, True)
        ]
        disturbing = asyncio.create_task(self._disturb(pid, kind, name))
        for each in asking:
            await each
            slowest = time.monotonic() - began
        await disturbing
        self.counts[f"{kind} {name}" if pid else "nobody to attack"] += 1
        await self.until_whole()
        load = os.getloadavg()[0]
        print(
            f"{kind} {name}: process {pid}, round {slowest:.1f} s, wrong {len(self.wrong)}, load {load:.1f}", flush=True
        )

    async def until_whole(self) -> None:
        """Returns when every process is there and all engines can be used."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                with suppress(httpx.HTTPError, KeyError):
                    if await self._fleet.whole(self._http):
                        return
                await asyncio.sleep(0.2)

    async def _disturb(self, pid: int | None, kind: str, name: str) -> None:
        if pid is None:
            return
        await asyncio.sleep(random.uniform(*DISTURBED_AFTER))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[f"SIG{name}"])
            if name == "STOP":
                await asyncio.sleep(random.uniform(*STOPPED_SECONDS))
                os.kill(pid, signal.SIGCONT)
        if name == "KILL":
            await self._fleet.replace(kind)

    async def _check(self, number: int, stream: bool) -> None:
        """Asks a question until it is answered by a gateway that is not killed meanwhile."""
        self.counts["answers"] += 1
        said: Answer | None = None
        end = time.monotonic() + ROUND_SECONDS
        while said is None and time.monotonic() < end:
            try:
                async with asyncio.timeout(ROUND_SECONDS):
                    said = await self._ask(number, stream)
            except (httpx.HTTPError, TimeoutError) as error:
                if not self._gateway_died or isinstance(error, TimeoutError):
                    return self.wrong.append(f"question {number}, stream {stream}: {error!r}")
                self.counts["asked again"] += 1
                await asyncio.sleep(0.2)
            except RuntimeError as error:
                return self.wrong.append(f"question {number}, stream {stream}: {error}")
        if said != self._known[number, stream]:
            self.wrong.append(f"question {number}, stream {stream}: {said} instead of {self._known[number, stream]}")
        return None

    async def _ask(self, number: int, stream: bool) -> Answer:
        messages = [{"role": "user", "content": f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": self._tokens, "temperature": 0, "stream": stream}
        text, reason = "", ""
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}")
            if not stream:
                choice = json.loads(await answer.aread())["choices"][0]
                return choice["message"]["content"], choice["finish_reason"]
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:300])
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
        return text, reason


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--questions", type=int, default=16, help="each is asked streamed and whole at once")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--foreign", action="store_true", help="the gateway knows the engines by their URLs alone")
    parser.add_argument("--attacks", nargs="*", help="such as engine:KILL; by default all in turn")
    options, more = parser.parse_known_args()
    attacks = [tuple(each.split(":")) for each in options.attacks or ()] or list(
        FOREIGN_ATTACKS if options.foreign else ATTACKS
    )
    fleet = (ForeignFleet if options.foreign else Fleet)(options.model, options.replicas, more)
    await fleet.start()
    limits = httpx.Limits(max_connections=2 * options.questions + 8)
    try:
        url = f"http://127.0.0.1:{fleet.port}"
        async with httpx.AsyncClient(base_url=url, timeout=ROUND_SECONDS, limits=limits) as http:
            attack = Attack(fleet, http, options.tokens)
            await attack.until_whole()
            await attack.learn(options.questions)
            end, number = time.monotonic() + options.seconds, 0
            while time.monotonic() < end:
                await attack.round(options.questions, *attacks[number % len(attacks)])
                number += 1
    finally:
        left = await fleet.end()
    print(dict(attack.counts), f"{len(attack.wrong)} wrong, {len(left)} processes left: {left}")
    for line in attack.wrong[:10]:
        print(line[:600])
    return 1 if attack.wrong or left else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

"""Sends mixed requests to a server, several at a time, and lists every answer that is not as it must be."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from tests.traffic.answers import Broken, judge, read
from tests.traffic.asking import Ask, Drawer
from tests.traffic.served import Server

TIMEOUT = 300.0  # seconds of silence after which an answer counts as lost
PAUSE = 1.0  # seconds that a client waits after it was refused
HOPELESS = 10  # violations after which no more requests are sent
REFUSED = {429, 503, 529}
DECLINED = {400}  # a schema or a tool of a public collection that is not supported


class Violation(NamedTuple):
    """Says what is wrong, and with which request."""

    reason: str
    ask: Ask | None
    detail: str = ""

    def shown(self, url: str) -> str:
        again = "" if self.ask is None else f"\n  {self.ask.curl(url)}"
        return f"{self.reason}{again}\n  {self.detail[:1500]}"


class Silence(NamedTuple):
    """Is the longest time between two pieces of an answer, in seconds, and when it ended."""

    seconds: float
    end: float


class Received(NamedTuple):
    """Is an answer as it came."""

    status: int
    content: bytes
    silence: Silence


@dataclass
class Tally:
    """Counts what became of requests."""

    done: Counter[str] = field(default_factory=Counter)  # by dialect
    kinds: Counter[str] = field(default_factory=Counter)  # by what was asked for
    repeated: int = 0
    left: int = 0
    declined: int = 0
    tokens: int = 0
    violations: list[Violation] = field(default_factory=list)

    def note(self, ask: Ask) -> None:
        self.done[ask.dialect] += 1
        self.kinds["streamed" if ask.stream else "whole"] += 1
        self.kinds.update(
            kind
            for kind in ("stop", "logprobs", "penalties", "prediction", "tools", "forced")
            if getattr(ask.wish, kind)
        )
        self.kinds["schema"] += ask.wish.schema is not None
        self.kinds["n"] += ask.wish.n > 1
        self.kinds["temperature 0" if ask.wish.temperature == 0 else "temperature 1"] += 1

    def table(self) -> str:
        rows = [*self.done.items(), *sorted(self.kinds.items())]
        rows += [("repeated", self.repeated), ("clients that left", self.left), ("declined", self.declined)]
        rows += [("tokens generated", self.tokens), ("violations", len(self.violations))]
        return "\n".join(f"{name:20} {count:8}" for name, count in rows)


class Mixed:
    """Asks a server and compares answers."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.tally = Tally()
        self.in_flight: dict[int, Ask] = {}
        self.on_received: Callable[[Ask, Received], None] | None = None
        self._known: dict[str, tuple[Ask, Any]] = {}

    async def receive(self, ask: Ask) -> Received | None:
        """Returns the answer; None if its client left before the end."""
        content, silence, last = bytearray(), Silence(0.0, 0.0), time.monotonic()
        async with self._http.stream("POST", ask.path, json=ask.sent) as response:
            pieces = 0
            async for piece in response.aiter_raw():
                now = time.monotonic()
                silence, last = max(silence, Silence(now - last, now)), now
                content += piece
                pieces += 1
                if ask.leave_after is not None and pieces > ask.leave_after:
                    return None
            return Received(response.status_code, bytes(content), silence)

    async def ask(self, ask: Ask) -> None:
        """Asks once, and notes what is wrong with the answer."""
        number = id(ask)
        self.in_flight[number] = ask
        try:
            received = await self._received(ask)
        except httpx.HTTPError as error:
            self.violated(f"the connection broke: {error!r}", ask)
            return
        finally:
            del self.in_flight[number]
        self.tally.note(ask)
        if received is None:
            self.tally.left += 1
        elif received.status in DECLINED and not ask.ours:
            self.tally.declined += 1
            self._compare(ask, received.content.decode())
        elif received.status != 200:
            await asyncio.sleep(PAUSE)
            what = "refused" if received.status in REFUSED else "not answered"
            self.violated(f"{what} with {received.status}", ask, received.content.decode())
        else:
            if self.on_received is not None:
                self.on_received(ask, received)
            self._check(ask, received)

    async def _received(self, ask: Ask) -> Received | None:
        if ask.leave_after is None or ask.stream:
            return await self.receive(ask)
        try:  # a client that waits for a whole answer leaves after some time
            return await asyncio.wait_for(self.receive(ask), 0.05 + 0.1 * ask.leave_after)
        except TimeoutError:
            return None

    def _check(self, ask: Ask, received: Received) -> None:
        try:
            answer = read(ask, received.content)
        except Broken as error:
            self.violated(str(error), ask)
            return
        self.tally.tokens += answer.usage.generated if answer.usage else 0
        for problem in judge(ask, answer):
            self.violated(problem, ask, f"got {answer}")
        if ask.repeatable:
            self._compare(ask, answer.plain)

    def _compare(self, ask: Ask, said: Any) -> None:
        if ask.key not in self._known:
            self._known[ask.key] = ask, said
            return
        before, other = self._known[ask.key]
        self.tally.repeated += 1
        if said != other:
            how = f"streamed: {before.stream} before, {ask.stream} now"
            self.violated(f"another answer than before ({how})", ask, f"before {other}\n  now    {said}")

    def violated(self, reason: str, ask: Ask | None, detail: str = "") -> None:
        self.tally.violations.append(Violation(reason, ask, detail))

    @property
    def hopeless(self) -> bool:
        return sum(not each.reason.startswith("refused") for each in self.tally.violations) >= HOPELESS


class Amount(NamedTuple):
    """Says when to stop: after so many requests or seconds."""

    requests: int
    seconds: float
    clients: int = 8


async def send(server: Server, drawer: Drawer, amount: Amount) -> Tally:
    """Sends requests; raises no error, but returns the violations with the counts."""
    limits = httpx.Limits(max_connections=amount.clients * 2)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as http:
        mixed, end = Mixed(http), time.monotonic() + amount.seconds
        left = iter(range(amount.requests))

        async def client() -> None:
            while time.monotonic() < end and not mixed.hopeless and next(left, None) is not None:
                await mixed.ask(drawer.draw())

        async def watch() -> None:
            while True:
                await asyncio.sleep(1.0)
                if (engine := await asyncio.to_thread(server.engine_now)) != server.engine:
                    asked = [ask.curl(server.url) for ask in mixed.in_flight.values()]
                    mixed.violated(f"the engine died: {engine} instead of {server.engine}", None, "\n  ".join(asked))
                    server.engine = engine

        watching = asyncio.create_task(watch())
        try:
            await asyncio.gather(*(client() for _ in range(amount.clients)))
        finally:
            watching.cancel()
        after(server, mixed)
    return mixed.tally


def after(server: Server, mixed: Mixed) -> None:
    """Checks that nothing is left of the requests, and that no engine has died."""
    metrics = server.until_idle()
    for name in ('penstock_kv_blocks{state="used"}', "penstock_engine_restarts_total"):
        if metrics[name]:
            mixed.violated(f"{name} is {metrics[name]}", None)
    for line in server.wrong():
        mixed.violated("the log has an error", None, line)

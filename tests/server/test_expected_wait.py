"""Tests admission by expected wait: on a virtual clock, and over HTTP."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from random import Random
from typing import Any

import httpx
import pytest

from penstock.errors import WaitTooLong
from penstock.ipc.inprocess import InProcessClient
from penstock.server.access.expected_wait import WaitForecast, allowed_wait, limit_of
from penstock.types import Claim, Request, SamplingParams, Stats
from tests.server import toys
from tests.server.conftest import Server, serving

NUMBERS = count()
ENDLESS = {"prompt": "[*x]", "max_tokens": 20_000, "stream": True}


def request(id: int, tenant: str = "", tokens: int = 50, background: bool = False, **claim: float) -> Request:
    stated = Claim(tenant, **claim)
    return Request(id, (1,) * tokens, SamplingParams(), 9, claim=stated, background=background)


class Engine:
    """Gives each tenant's oldest waiting request its first token in turn, `rate` a second, on a virtual clock. It may
    stand for several engines, which are so fast together."""

    def __init__(self, rate: float, patience: float | None = None, engines: int = 1) -> None:
        self.forecast = WaitForecast()
        self._engines = engines
        self.lines: dict[str, list[tuple[int, float]]] = {}
        self.waits: dict[str, list[float]] = {}
        self.refused: Counter[str] = Counter()
        self.retries: list[float] = []
        self.now = self._next = 0.0
        self._patience, self._step, self._ids = patience, 1 / rate, 0
        self._prompts = 0  # tokens
        self._served: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return sum(map(len, self.lines.values()))

    def send(self, tenant: str = "", **stated: float) -> None:
        self._ids += 1
        asked = request(self._ids, tenant, **stated)  # type: ignore[arg-type]
        try:
            busy = self._engines * self.now
            done = {"prompt_tokens": self._prompts, "computed_tokens": self._prompts}
            stats = Stats(in_line=self.waiting, busy_seconds=busy, **done)
            self.forecast.measure(stats, self._engines)
            self.forecast.admit(asked, self._patience, self.now)
        except WaitTooLong as error:
            self.refused[tenant] += 1
            self.retries.append(error.retry_after)
        else:
            if not self.lines.get(tenant):
                self._served[tenant] = max(self._served.values(), default=0)
            self.lines.setdefault(tenant, []).append((self._ids, self.now))

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        until = self.now + seconds
        while (at := max(self._next, self.now)) <= until and self.waiting:
            self.now, self._next = at, at + self._step
            tenant = min((tenant for tenant, line in self.lines.items() if line), key=self._served.__getitem__)
            self._served[tenant] += 1
            id, sent = self.lines[tenant].pop(0)
            self.waits.setdefault(tenant, []).append(self.now - sent)
            self._prompts += 50
            self.forecast.answer(id, self.now)
        self.now = until


def test_what_is_accepted_at_three_times_the_capacity_meets_its_target() -> None:
    random, engine = Random(1), Engine(rate=20)
    for _ in range(60 * 100):
        if random.random() < 0.6:
            engine.send(ttft=2.0)
        engine.run(0.01)
    late = [wait for wait in engine.waits[""][100:] if wait > 2.0]
    assert len(late) <= 0.05 * len(engine.waits[""])
    assert len(engine.waits[""]) > 0.95 * 60 * 20  # nothing stands idle
    assert engine.refused[""] > 1000
    assert min(engine.retries) >= 1
    engine.run(5)
    engine.send(ttft=2.0)  # at once when the load is gone
    assert engine.waiting == 1


def test_several_engines_share_what_waits() -> None:
    random, fleet = Random(2), Engine(rate=60, engines=3)
    for _ in range(30 * 100):
        if random.random() < 0.9:
            fleet.send(ttft=2.0)
        fleet.run(0.01)
    waits = fleet.waits[""][500:]
    assert max(waits) < 2.0
    assert sum(waits) / len(waits) > 1.0  # three times as many may wait as before one
    assert fleet.refused[""] > 300


def test_short_prompts_do_not_wait_for_ever_behind_a_long_one() -> None:
    """An engine computes 1,000 tokens a second. A prompt of 3,000 has begun, and a short one comes every 100 ms."""
    forecast = WaitForecast()
    forecast.admit(request(0, tokens=3000), 60.0, 0.0)
    for tenth in range(1, 40):
        stats = Stats(in_line=1, busy_seconds=tenth / 10, prompt_tokens=3000, computed_tokens=100 * tenth)
        forecast.measure(stats)
        assert 0 <= forecast.expect(request(tenth, tokens=9)) < 4.0
    assert forecast.expect(request(99, tokens=9)) > 3.0


def test_what_says_how_long_a_request_may_wait() -> None:
    claims = Claim(), Claim(ttft=2.0), Claim(deadline=3.0), Claim(deadline=3.0, ttft=2.0), Claim(deadline=1.0, ttft=2.0)
    assert [limit_of(claim) for claim in claims] == ["patience", "ttft", "deadline", "ttft", "deadline"]
    assert Claim(deadline=3.0, ttft=0.5, itl=0.1).after(1.0) == Claim(deadline=2.0, ttft=0.0, itl=0.1)
    assert Claim().after(1.0) == Claim()


def test_nobody_is_refused_before_anything_was_measured_nor_while_nobody_waits() -> None:
    engine = Engine(rate=0.1)
    engine.send(ttft=0.001)
    engine.run(60)
    engine.send(ttft=0.001)
    assert not engine.refused


def test_a_light_tenant_is_not_refused_for_the_line_of_another() -> None:
    engine = Engine(rate=20)
    for _ in range(400):
        engine.send("greedy", ttft=3.0)
        engine.run(0.02)
    assert engine.refused["greedy"] > 50
    for _ in range(20):
        engine.send("light", ttft=1.0)
        engine.run(0.5)
    assert not engine.refused["light"]
    assert max(engine.waits["light"]) < 0.2


def test_without_a_target_patience_decides_and_background_requests_wait() -> None:
    engine = Engine(rate=10, patience=5.0)
    for _ in range(1000):
        engine.send()
        engine.run(0.02)
    assert engine.refused[""] > 300
    assert max(engine.waits[""]) < 10
    engine.forecast.admit(request(5000, background=True), 0.001, engine.now)
    engine.forecast.answer(5000, engine.now)
    assert allowed_wait(Claim(), None) == float("inf")
    assert allowed_wait(Claim(deadline=3.0, ttft=5.0), 60.0) == 3.0


def test_a_prompt_that_alone_takes_longer_than_its_target_may_wait_a_little() -> None:
    engine = Engine(rate=10)
    for _ in range(200):
        engine.send()
        engine.run(0.09)
    while engine.waiting > 1:
        engine.run(0.1)
    engine.send(tokens=5000, ttft=4.0)
    assert not engine.refused


def test_requests_that_end_without_a_token_wait_no_longer() -> None:
    forecast = WaitForecast()
    forecast.admit(request(1, "one"), None, 0.0)
    forecast.end(1)
    forecast.end(1)
    assert not forecast._lines


# -- over HTTP ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """Serves an engine that takes 20 ms for each 64 tokens, and answers one request at a time."""
    client = InProcessClient(partial(toys.open_paced_parrot, 0.02, max_rows=1), "parrot")
    with serving(client, toys.ToyText(), "toy/parrot") as server:
        yield server


def ask(server: Server, tokens: int, **fields: Any) -> httpx.Response:
    """Sends a prompt of so many tokens that no other begins with."""
    prompt = f"{next(NUMBERS):8}".ljust(tokens - 4, ".") + "[ok]"
    return server.post("/v1/completions", prompt=prompt, **{"max_tokens": 2} | fields)


def test_a_deadline_that_a_prompt_cannot_meet_is_refused_though_nothing_waits(paced: Server) -> None:
    """The prompt takes a second and a quarter, as the engine has learned from others."""
    for _ in range(2):
        assert ask(paced, 300).status_code == 200
    paced.until_idle()
    answer = ask(paced, 4000, deadline_ms=600)
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "wait_too_long"
    found = re.search(r"takes about (\S+) s to compute, and (\S+) s are left", answer.json()["error"]["message"])
    assert found is not None
    needed, left = map(float, found.groups())
    assert left <= 0.6 < 1.0 < needed
    assert int(answer.headers["retry-after"]) >= max(1, int(needed - left))
    assert 'penstock_requests_refused_total{reason="deadline"} 1.0' in paced.get("/metrics").text
    assert ask(paced, 2000, ttft_target_ms=1).status_code == 200  # a target hurts nobody while nothing waits
    assert ask(paced, 2000, deadline_ms=60_000).status_code == 200


def test_what_expires_in_line_is_told_when_to_retry_by_the_forecast(paced: Server, monkeypatch: Any) -> None:
    forecasts = iter([0.0])
    with paced.http.stream("POST", "/v1/completions", json=ENDLESS) as running:
        lines = running.iter_lines()
        next(lines)
        monkeypatch.setattr(WaitForecast, "expect", lambda self, request: next(forecasts, 40.0))
        answer = ask(paced, 20, deadline_ms=300)
    assert answer.status_code == 429
    assert 30 < int(answer.headers["retry-after"]) <= 40


def test_what_would_wait_too_long_is_refused_with_the_time_to_retry(parrot: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(WaitForecast, "expect", lambda self, request: 100.0)
    answer = parrot.post("/v1/completions", prompt="[x]", max_tokens=2)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "wait_too_long"
    assert 30 < int(answer.headers["retry-after"]) <= 100
    assert 'penstock_requests_refused_total{reason="patience"} 1.0' in parrot.get("/metrics").text

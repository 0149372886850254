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
from penstock.server.access.expected_wait import ExpectedRequest, WaitForecast, allowed_wait, limit_of
from penstock.types import Claim, Limits, Request, SamplingParams, Stats
from tests.server import toys
from tests.server.conftest import Server, serving

NUMBERS = count()
LIMITS = Limits(max_len=4096, max_rows=16, step_tokens=64, block_size=16, num_blocks=1024, vocab=257)
ENDLESS = {"prompt": "[*x]", "max_tokens": 20_000, "stream": True}


def request(id: int, tenant: str = "", tokens: int = 50, background: bool = False, **claim: float) -> Request:
    stated = Claim(tenant, **claim)
    return Request(id, (id,) * tokens, SamplingParams(), 9, claim=stated, background=background)


class Engine:
    """Gives each tenant's oldest waiting request its first token in turn, `rate` a second, on a virtual clock. It may
    stand for several engines, which are so fast together."""

    def __init__(self, rate: float, patience: float | None = None, engines: int = 1) -> None:
        self.forecast = WaitForecast()
        self._engines = engines
        self.lines: dict[str, list[ExpectedRequest]] = {}
        self.waits: dict[str, list[float]] = {}
        self.refused: Counter[str] = Counter()
        self.retries: list[float] = []
        self.now = self._next = 0.0
        self._patience, self._step, self._ids = patience, 1 / rate, 0
        self._prompts = 0.0  # seconds
        self._served: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return sum(map(len, self.lines.values()))

    def send(self, tenant: str = "", **stated: float) -> None:
        self._ids += 1
        asked = request(self._ids, tenant, **stated)  # type: ignore[arg-type]
        try:
            self._measure()
            expected = self.forecast.admit(asked, self._patience, self.now, LIMITS)
        except WaitTooLong as error:
            self.refused[tenant] += 1
            self.retries.append(error.retry_after)
        else:
            if not self.lines.get(tenant):
                self._served[tenant] = max(self._served.values(), default=0)
            self.lines.setdefault(tenant, []).append(expected)

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        until = self.now + seconds
        while (at := max(self._next, self.now)) <= until and self.waiting:
            self.now, self._next = at, at + self._step
            tenant = min((tenant for tenant, line in self.lines.items() if line), key=self._served.__getitem__)
            self._served[tenant] += 1
            expected = self.lines[tenant].pop(0)
            self.waits.setdefault(tenant, []).append(self.now - expected.sent)
            self._prompts += self._engines * self._step
            self._measure()
            self.forecast.answer(expected, self.now, 0)
        self.now = until

    def _measure(self) -> None:
        """Shows the statistics. All the time goes to prompts, of 50 tokens each."""
        seconds = self._engines * self._step / 50, 0.0, 0.0
        stats = Stats(busy_seconds=self._prompts, prompt_seconds=self._prompts, step_seconds=seconds)
        self.forecast.measure(stats, self._engines)


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


def measured(prompts: float = 0.0, answers: float = 0.0) -> Stats:
    """Returns the statistics of an engine that computes 1,000 tokens of prompts a second, after so many seconds of
    both."""
    return Stats(busy_seconds=prompts + answers, prompt_seconds=prompts, step_seconds=(0.001, 0.0, 0.0))


def test_what_is_computed_of_a_long_prompt_is_not_waited_for() -> None:
    forecast = WaitForecast()
    forecast.measure(measured())
    forecast.admit(request(1, tokens=3000), 60.0, 0.0, LIMITS)
    forecast.measure(measured(prompts=2.0))
    assert forecast.admit(request(2, tokens=3000), 60.0, 2.0, LIMITS).by_model == pytest.approx(1.0 + 3.0)


def test_a_short_prompt_goes_before_a_long_one_that_came_not_much_earlier() -> None:
    forecast = WaitForecast()
    forecast.measure(measured())
    forecast.admit(request(1, tokens=3000), 60.0, 0.0, LIMITS)
    assert forecast.admit(request(2, tokens=10), 60.0, 1.0, LIMITS).by_model == 0.0  # nothing is ahead of it
    assert forecast.admit(request(3, tokens=10), 60.0, 20.0, LIMITS).by_model > 3.0


def test_those_with_other_priorities_are_ahead_or_not() -> None:
    forecast = WaitForecast()
    forecast.measure(measured())
    for id, priority in enumerate((-1, 0, 1)):
        forecast.admit(request(id, tokens=1000)._replace(priority=priority), 60.0, 0.0, LIMITS)
    ahead = [
        forecast.admit(request(9 + at, tokens=1000)._replace(priority=at), 60.0, 0.0, LIMITS).by_model
        for at in (-2, -1, 0, 1)
    ]
    assert ahead == pytest.approx([0.0, 3.0, 5.0, 7.0])


def test_the_time_of_answers_counts_for_requests_or_for_prompts_whichever_is_less() -> None:
    forecast, answers = WaitForecast(), 0.0
    for id in range(8):  # 10 tokens of a prompt and a second of answers each
        forecast.measure(measured(0.01 * id, answers))
        short = forecast.admit(request(id, tokens=10), 60.0, 0.0, LIMITS)
        answers += 1.0
        forecast.measure(measured(0.01 * (id + 1), answers))
        forecast.answer(short, 0.1, 0)
        forecast.end(short, (), LIMITS)
    forecast.admit(request(20, tokens=2000), 60.0, 0.0, LIMITS)
    long = forecast.admit(request(21, tokens=2000), 60.0, 0.0, LIMITS).by_model
    assert long == pytest.approx(2.0 + 1.0 + 2.0 + 1.0)  # not 200 s for 2,000 tokens
    short_one = forecast.admit(request(22, tokens=10), 60.0, 100.0, LIMITS).by_model
    assert short_one == pytest.approx(4.0 + 2.0 + 0.01 + 1.0)


def test_outcomes_say_what_forecasts_were_and_which_first_tokens_were_late() -> None:
    forecast = WaitForecast()
    forecast.measure(measured())
    first, *others = [forecast.admit(request(id, tokens=1000, ttft=9.0), None, 0.0, LIMITS) for id in range(4)]
    assert forecast.answer(first, 1.0, 0) == (False, "")
    outcomes = [forecast.answer(each, now, 0) for each, now in zip(others, (2.1, 10.0, 0.5), strict=True)]
    assert outcomes == [(False, "right"), (True, "too_low"), (False, "too_high")]


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
    background = engine.forecast.admit(request(5000, background=True), 0.001, engine.now, LIMITS)
    engine.forecast.answer(background, engine.now, 0)
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
    expected = forecast.admit(request(1, "one"), None, 0.0, LIMITS)
    assert forecast._lines
    forecast.end(expected, (), LIMITS)
    forecast.end(expected, (), LIMITS)
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


def test_a_list_of_prompts_is_not_refused_for_its_own_line(paced: Server) -> None:
    def sent(count: int, **fields: Any) -> int:
        prompts = [f"{next(NUMBERS):8}".ljust(196, ".") + "[ok]" for _ in range(count)]
        return paced.post("/v1/completions", prompt=prompts, max_tokens=2, **fields).status_code

    assert sent(8) == 200  # the engine has measured what prompts cost
    paced.until_idle()
    assert [sent(12, ttft_target_ms=200) for _ in range(2)] == [200, 200]


def test_what_expires_in_line_is_told_when_to_retry_by_the_forecast(paced: Server, monkeypatch: Any) -> None:
    with paced.http.stream("POST", "/v1/completions", json=ENDLESS) as running:
        lines = running.iter_lines()
        next(lines)
        monkeypatch.setattr(WaitForecast, "_forecast", lambda self, *_: (0.0, 0.0))  # it is admitted
        monkeypatch.setattr(WaitForecast, "_forecast_and_limit", lambda self, *_: (40.0, 0.3))
        answer = ask(paced, 20, deadline_ms=300)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "40"


def test_what_would_wait_too_long_is_refused_with_the_time_to_retry(parrot: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(WaitForecast, "_forecast", lambda self, *_: (100.0, 0.0))
    answer = parrot.post("/v1/completions", prompt="[x]", max_tokens=2)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "wait_too_long"
    expected = "the first token would come after about 100.0 s, and 60 s are allowed: retry in 40 s"
    assert answer.json()["error"]["message"] == expected
    assert answer.headers["retry-after"] == "40"
    assert 'penstock_requests_refused_total{reason="patience"} 1.0' in parrot.get("/metrics").text


def test_first_tokens_are_counted_as_in_time_or_late(parrot: Any) -> None:
    def counted(outcome: str) -> float:
        found = re.search(
            rf'penstock_first_tokens_total{{limit="ttft",outcome="{outcome}"}} (\S+)', parrot.get("/metrics").text
        )
        return float(found[1]) if found else 0.0

    before = counted("in_time"), counted("late")
    for target in (60_000, 1, 60_000):
        assert parrot.post("/v1/completions", prompt="[x]", max_tokens=2, ttft_target_ms=target).status_code == 200
    late = counted("late") - before[1]
    assert counted("in_time") - before[0] == 3 - late
    assert late <= 1  # a fast machine may answer within a millisecond

"""Tests a server under more load than it can bear, over HTTP: what is accepted is answered, what is refused is told
when to come back and is counted, and afterwards everything is as before."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.keys import changing
from penstock.server.access import guard
from penstock.server.access.guard import Rules
from tests.server import toys
from tests.server.conftest import WAIT, Server, serving
from tests.server.test_keys import Locked

MODEL = "toy/parrot"
CHAT = "/v1/chat/completions"
CLIENTS = 24


@pytest.fixture
def narrow() -> Iterator[Server]:
    """Computes two requests at once, of which each takes 50 ms, and lets eight wait."""
    client = InProcessClient(partial(toys.open_paced_parrot, 0.005, max_rows=2), "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(max_waiting=8)) as server:
        yield server


class Load:
    """Has clients that send one request after the other, whatever the answers are."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.answers: list[httpx.Response] = []
        self._numbers, self._stop = count(), threading.Event()

    def statuses(self) -> Counter[int]:
        return Counter(answer.status_code for answer in list(self.answers))

    def send(self) -> None:
        with httpx.Client(base_url=self.server.url, timeout=WAIT) as http:
            while not self._stop.is_set():
                number = next(self._numbers)
                body = {
                    "prompt": f"{number} [answered]",
                    "max_tokens": 20,
                    "ttft_target_ms": 20 if number % 2 else None,
                }
                self.answers.append(http.post("/v1/completions", json=body))

    def run_until(self, **least: int) -> None:
        """Sends until there are so many answers of each status."""
        wanted = {int(status.removeprefix("status_")): number for status, number in least.items()}
        with ThreadPoolExecutor(CLIENTS) as clients:
            sending = [clients.submit(self.send) for _ in range(CLIENTS)]
            try:
                self.server.until(lambda: all(self.statuses()[status] >= wanted[status] for status in wanted))
            finally:
                self._stop.set()
            for each in sending:
                each.result(WAIT)


def test_overload_is_bounded_told_and_over_at_once(narrow: Server) -> None:
    load = Load(narrow)
    load.run_until(status_200=30, status_429=5, status_503=5)
    assert load.statuses().keys() == {200, 429, 503}
    for answer in load.answers:
        if answer.status_code == 200:
            (choice,) = answer.json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("answered", "stop")
        else:
            expected = "wait_too_long" if answer.status_code == 429 else "overloaded"
            assert answer.json()["error"]["code"] == expected
            assert int(answer.headers["retry-after"]) >= 1
    narrow.until_idle()
    body = {"prompt": "[over]", "max_tokens": 20, "ttft_target_ms": 20}
    again = [narrow.post("/v1/completions", **body) for _ in range(5)]
    assert [answer.status_code for answer in again] == [200] * 5
    stats = narrow.client.stats
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


# -- counted ------------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Locked]:
    """Has keys, and one place."""
    with changing(tmp_path / "keys.json"):
        pass
    client = InProcessClient(partial(toys.open_paced_parrot, 0.002, max_rows=1), "parrot")
    rules = Rules(keys=tmp_path / "keys.json", max_waiting=0)
    with serving(client, toys.ToyText(), MODEL, rules=rules) as server:
        yield Locked(server, tmp_path / "keys.json")


def test_refusals_are_counted_by_status_and_reason(locked: Locked) -> None:
    key, limited = locked.key("alice", monitor=True), locked.key("limited", concurrent=1)

    def counted() -> dict[tuple[int, str], float]:
        text = locked.server.http.get("/metrics", headers={"x-api-key": key}).text
        found = re.findall(rf'http_responses_total{{reason="(\w*)",route="{CHAT}",status="(\d+)"}} (\S+)', text)
        return {(int(status), reason): float(value) for reason, status, value in found}

    assert locked.ask("nonsense").status_code == 401
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "BODY_SECONDS", 0.1)
        url = httpx.URL(locked.server.url)
        with socket.create_connection((url.host, url.port or 80), timeout=WAIT) as wire:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-length: 100\r\n\r\n"
            wire.sendall(head.encode() + b"{")
            assert wire.recv(4096).startswith(b"HTTP/1.1 408 ")
    endless: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "[*x]"}], "stream": True}
    with locked.server.http.stream("POST", CHAT, json=endless, headers={"x-api-key": limited}) as running:
        lines = running.iter_lines()
        next(lines)
        assert locked.ask(limited).status_code == 429  # this key's own limit
        assert locked.ask(key).status_code == 503  # the only place is taken
    expected = {(401, "invalid_api_key"), (408, "request_timeout"), (429, "rate_limit_exceeded"), (503, "overloaded")}
    locked.server.until(lambda: expected <= counted().keys())
    assert {each: counted()[each] for each in expected} == dict.fromkeys(expected, 1.0)

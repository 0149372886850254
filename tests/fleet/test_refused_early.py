"""A gateway whose replicas are full refuses at once what would begin too late, as a single engine does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx
import pytest

from tests.fleet.foreign.scripted import metric
from tests.fleet.test_server_suites import MODEL, fleet_serving
from tests.server.conftest import Server
from tests.server.toys import LIMITS

SAY = [{"role": "user", "content": "[hello]"}]
MANY = 8 * LIMITS.max_rows  # four times as many as two replicas have rows
PROBES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAY, "stream": True},
    "/v1/messages": {"messages": SAY, "max_tokens": 9},
    "/api/chat": {"messages": SAY},
    "/v1/responses": {"input": "[hello]"},
}


@contextmanager
def loaded(server: Server) -> Iterator[list[Future[list[int]]]]:
    """Keeps all rows of all replicas busy, and more requests waiting."""
    enough = Event()

    def load(number: int) -> list[int]:
        prompts, statuses = [f"[{number} {each} is what is said]" for each in range(MANY)], list[int]()
        while not enough.is_set():
            answer = server.post("/v1/completions", model=MODEL, prompt=prompts, max_tokens=30)
            statuses.append(answer.status_code)
        return statuses

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(load, number) for number in range(2)]
        try:
            yield asking
        finally:
            enough.set()


def ask(server: Server, path: str, **headers: str) -> httpx.Response:
    return server.http.post(path, json={"model": MODEL, **PROBES[path]}, headers=headers)


def test_what_would_wait_too_long_is_refused_while_replicas_are_full() -> None:
    with fleet_serving("slow parrot") as server:
        for path in PROBES:  # nobody waits, so nobody is refused, whatever is asked for
            assert ask(server, path, **{"x-request-ttft-target-ms": "1"}).status_code == 200
        with loaded(server) as asking:
            refused = {path: _refused(server, path) for path in PROBES}
            assert ask(server, "/v1/messages").status_code == 200  # without a target it waits
        assert {status for each in asking for status in each.result()} == {200}
        server.until_idle()
        assert ask(server, "/v1/messages", **{"x-request-deadline-ms": "60000"}).status_code == 200
        assert metric(server, 'penstock_requests_refused_total{reason="ttft"}') >= len(PROBES)
    for path, answer in refused.items():
        assert "the first token would come after about" in answer.text, path
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) == pytest.approx(
            1000 * int(answer.headers["retry-after"]), abs=1000
        )
    assert refused["/v1/chat/completions"].json()["error"]["code"] == "wait_too_long"
    assert refused["/v1/messages"].json()["error"]["type"] == "rate_limit_error"


def _refused(server: Server, path: str) -> httpx.Response:
    """Asks until it is refused: the forecast has to have seen how fast replicas are while some wait."""
    answers: list[httpx.Response] = []

    def asked() -> bool:
        answers.append(ask(server, path, **{"x-request-ttft-target-ms": "1"}))
        return answers[-1].status_code != 200

    server.until(asked)
    assert answers[-1].status_code == 429
    return answers[-1]

"""GET /engine: what the engine does now, and where the time of the last requests went."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.step_history import KEPT, StepHistory
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server.access.guard import Rules
from penstock.service_levels import ServiceTerms
from penstock.types import Stats
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
LONG = "[a prompt of more than two blocks of sixteen tokens]"


def view(server: Server, key: str = "") -> dict[str, Any]:
    answer = server.http.get("/engine", headers={"authorization": f"Bearer {key}"} if key else {})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_it_tells_how_requests_went(parrot: Server) -> None:
    for _ in range(2):
        parrot.post("/v1/completions", model=MODEL, prompt=LONG, max_tokens=20)
    parrot.until_idle()
    told = view(parrot)
    again, first = told["ended"][:2]
    assert (first["prompt_tokens"], first["cached_tokens"], again["cached_tokens"]) == (len(LONG), 0, 48)
    assert (again["model"], again["reason"], again["generated_tokens"]) == (MODEL, "length", 20)
    assert 0 < again["first_token"] <= again["seconds"]
    assert all(again[stage] >= 0 for stage in ("queue", "prefill", "decode"))
    assert again["preemptions"] == 0
    assert told["latency"]["first_token"] > 0
    assert "prompt of more" not in str(told)  # it tells nothing of what requests say


def test_it_counts_steps_and_blocks(parrot: Server) -> None:
    parrot.post("/v1/completions", model=MODEL, prompt="[hello]", max_tokens=5)
    parrot.until_idle()
    told = view(parrot)
    (model,) = told["models"]
    assert (model["name"], model["state"], model["max_len"], model["blocks"]) == (MODEL, "awake", 512, 256)
    assert sum(told["stats"]["kv_blocks"].values()) == model["blocks"]
    assert model["steps"][-1][1] == told["stats"]["steps"]
    assert sum(step[4] for step in model["steps"]) > 0
    assert told["requests"] == told["replicas"] == told["engines"] == []


def test_a_request_in_flight_is_seen(slow_parrot: Server) -> None:
    body = {"model": MODEL, "prompt": "[*abc]", "max_tokens": 9000, "stream": True}
    with slow_parrot.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # the connection ends with it
        next(lines)
        (live,) = view(slow_parrot)["requests"]
        assert live["id"] == answer.headers["x-request-id"]
    assert (live["phase"], live["prompt_tokens"], live["max_tokens"]) == ("decode", 6, 9000)
    assert live["generated_tokens"] > 0
    slow_parrot.until(lambda: not view(slow_parrot)["requests"])
    assert view(slow_parrot)["ended"][0]["reason"] == "abort"


def test_phases_are_those_of_each_request() -> None:
    """Two rows: one request answers, one computes a prompt for seconds, one waits for a row."""
    engine = partial(toys.open_paced_parrot, 0.01, max_rows=2, step_tokens=16)
    with ExitStack() as stack:
        server = stack.enter_context(serving(InProcessClient(engine, "parrot"), toys.ToyText(), MODEL))
        for prompt in ("[*abc]", "x" * 12_000, "[later]"):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 9000, "stream": True}
            known = len(view(server)["requests"])
            stack.enter_context(_asking(server, body))
            server.until(lambda known=known: len(view(server)["requests"]) > known)  # type: ignore[misc]
            server.until(lambda: view(server)["requests"][0]["phase"] == "decode")
        server.until(lambda: [each["phase"] for each in view(server)["requests"]] == ["decode", "prefill", "waiting"])


@contextmanager
def _asking(server: Server, body: dict[str, Any]) -> Iterator[None]:
    """Sends a request, whose answer nobody waits for, and leaves in the end."""
    sent, url = json.dumps(body).encode(), httpx.URL(server.url)
    assert url.port is not None
    with socket.create_connection((url.host, url.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(sent)}\r\n"
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + sent)
        yield


def test_steps_are_told_apart_by_their_number() -> None:
    history, before = StepHistory(), Stats()
    for step in range(1, 2 * KEPT):
        after = Stats(steps=step, busy_seconds=step / 4, computed_tokens=3 * step, generated_tokens=step, running=2)
        history.note(before, after)
        history.note(after, after)  # statistics come after other messages, too
        before = after
    assert len(history.samples) == KEPT
    last = history.samples[-1]
    assert (last.step, last.seconds, last.tokens, last.generated, last.running) == (2 * KEPT - 1, 0.25, 3, 1, 2)
    history.note(before, Stats())  # another engine
    assert history.samples[-1] is last


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[Server, dict[str, str]]]:
    file, secrets = tmp_path / "keys.json", {name: new_key() for name in ("alice", "bob", "root")}
    with changing(file) as keys:
        for name, secret in secrets.items():
            keys.append(Key(name=name, sha256=digest(secret.encode()), created=now(), admin=name == "root"))
    client = InProcessClient(toys.open_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(keys=file)) as server:
        yield server, secrets


def test_a_key_sees_its_own_requests_and_an_admin_all(locked: tuple[Server, dict[str, str]]) -> None:
    server, secrets = locked
    assert httpx.get(f"{server.url}/engine").status_code == 401
    for name in ("alice", "bob"):
        headers = {"authorization": f"Bearer {secrets[name]}"}
        server.http.post("/v1/completions", json={"model": MODEL, "prompt": "[hi]", "max_tokens": 3}, headers=headers)
    server.until_idle()
    seen = {name: [each["key"] for each in view(server, secret)["ended"]] for name, secret in secrets.items()}
    assert seen == {"alice": ["alice"], "bob": ["bob"], "root": ["bob", "alice"]}


def test_a_tenant_that_a_proxy_names_sees_its_own_requests() -> None:
    rules = Rules(terms=ServiceTerms(tenant_header="x-tenant"))
    client = InProcessClient(toys.open_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=rules) as server:
        for tenant, tokens in (("a", 1), ("b", 2)):
            asked = {"model": MODEL, "prompt": "[hello]", "max_tokens": tokens}
            assert server.http.post("/v1/completions", json=asked, headers={"x-tenant": tenant}).status_code == 200
        server.until_idle()
        seen = [server.http.get("/engine", headers={"x-tenant": tenant}).json()["ended"] for tenant in ("a", "b")]
        assert [[each["generated_tokens"] for each in ended] for ended in seen] == [[1], [2]]
        assert len(view(server)["ended"]) == 2

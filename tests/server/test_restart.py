"""kill -9 of the engine process: said in /health, told to whoever waited, and over soon."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

MODEL = "toy/parrot"
ENDLESS = {"model": MODEL, "messages": [{"role": "user", "content": "[*abc]"}]}


def kill(server: Any) -> int:
    pid = server.client.hello.pid
    health = server.get("/health").json()
    assert (health["status"], health["engine"]) == ("ok", {"pid": pid, "model": MODEL})
    os.kill(pid, signal.SIGKILL)
    return pid


def test_in_flight_requests_fail_and_new_ones_are_served(parrot_process: Any) -> None:
    server = parrot_process
    sdk = server.sdk()
    stream = sdk.chat.completions.create(**ENDLESS, stream=True)
    for _ in range(3):
        next(stream)
    pid = kill(server)
    with pytest.raises(openai.APIError, match=f"the engine process {pid} was killed by SIGKILL") as died:
        list(stream)
    assert died.value.code == "engine_died"
    server.until(lambda: server.get("/health").status_code == 200)
    health = server.get("/health").json()
    assert health["engine"]["pid"] not in (pid, os.getpid())
    answer = sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "[again]"}])
    assert answer.choices[0].message.content == "again"
    metrics = server.get("/metrics").text
    assert "penstock_engine_restarts_total 1.0" in metrics
    assert 'penstock_requests_finished_total{reason="error"} 1.0' in metrics


def test_without_an_engine_the_answer_is_503(mortal_parrot: Any) -> None:
    server = mortal_parrot
    pid = kill(server)
    server.until(lambda: "given up" in server.client.unavailable_reason)
    assert server.get("/health").status_code == 503
    health = server.get("/health").json()
    assert health["engine"] is None
    assert health["status"] == "unavailable"
    assert str(pid) in health["message"]
    refused = server.post("/v1/chat/completions", **ENDLESS)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert refused.json()["error"]["type"] == "server_error"
    with pytest.raises(openai.InternalServerError, match="given up"):
        server.sdk().chat.completions.create(**ENDLESS, stream=True)
    assert server.get("/v1/models").status_code == 200
    assert "penstock_engine_up 0.0" in server.get("/metrics").text


def test_a_whole_answer_under_way_becomes_a_503(parrot_process: Any) -> None:
    server = parrot_process
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(server.post, "/v1/chat/completions", **ENDLESS)
        server.until(lambda: server.client.stats.running == 1)
        kill(server)
        answer = asking.result(30)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_died"

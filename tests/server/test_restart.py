"""The engine process is killed under streams of every dialect: no client notices, /health tells the truth, and a server
that has no engine says so."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

MODEL = "toy/parrot"
SAID = "The quick brown fox jumps over the lazy dog. " * 4
PROMPT = f"[{SAID}]"
CHAT = [{"role": "user", "content": PROMPT}]
ENDLESS = {"model": MODEL, "messages": [{"role": "user", "content": "[*abc]"}]}

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "stream_options": {"include_usage": True}}),
    "openai, two choices": ("/v1/chat/completions", {"messages": CHAT, "n": 2}),
    "openai, text": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 300, "echo": True}),
    "anthropic": ("/v1/messages", {"messages": CHAT, "max_tokens": 300}),
    "responses": ("/v1/responses", {"input": PROMPT}),
    "ollama": ("/api/chat", {"messages": CHAT}),
    "ollama, text": ("/api/generate", {"prompt": PROMPT, "raw": True}),
    "llama.cpp": ("/completion", {"prompt": PROMPT, "n_predict": 300}),
    "sglang": ("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 300}}),
    "tgi": ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 300}}),
    "kserve": ("/v2/models/toy%2Fparrot/generate_stream", {"text_input": PROMPT, "max_tokens": 300}),
}
DIFFERS = re.compile(
    "^(id|seed|item_id|call_id|system_fingerprint|timings|e2e_latency)$|created|completed_at|duration|cache"
)


def plain(value: Any) -> Any:
    """Returns an answer without what differs between any two: ids, times, and what was cached."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if not DIFFERS.search(name)}
    return value


def uncounted(value: Any) -> Any:
    """Returns an answer without the tokens that were not cached: that depends on what was asked just before."""
    if isinstance(value, list):
        return [uncounted(each) for each in value]
    if isinstance(value, dict):
        return {name: uncounted(each) for name, each in value.items() if name != "input_tokens"}
    return value


def stream(server: Any, name: str) -> list[Any]:
    """Returns the events of a streamed answer, those of each choice together."""
    return events_of(server, *STREAMS[name])


def events_of(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    with server.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data:").strip() for line in answer.iter_lines()]
    events = [plain(json.loads(line)) for line in lines if line.startswith("{")]
    return sorted(events, key=lambda event: [choice["index"] for choice in event.get("choices") or ()])


def kill(server: Any, kind: signal.Signals = signal.SIGKILL) -> int:
    server.until(lambda: server.client.state == "ready")
    pid = server.client.hello.pid
    os.kill(pid, kind)
    server.until(lambda: server.client.hello is None or server.client.hello.pid != pid)
    return int(pid)


def test_no_stream_of_any_dialect_is_lost_or_different(parrot_process: Any) -> None:
    server = parrot_process
    alone = {name: stream(server, name) for name in STREAMS}
    assert all(len(events) > 20 for events in alone.values())

    with ThreadPoolExecutor(2 * len(STREAMS)) as pool:
        asked = {(name, turn): pool.submit(stream, server, name) for turn in range(2) for name in STREAMS}
        for _ in range(3):
            server.until(lambda: server.client.stats.generated_tokens > 200 or all(map(Future.done, asked.values())))
            kill(server)
        answers = {key: asking.result() for key, asking in asked.items()}
    assert server.client.restarts == 3
    for (name, _), events in answers.items():
        assert events == alone[name], name
    assert 'reason="error"' not in server.get("/metrics").text


def test_embeddings_and_whole_answers_survive_too(parrot_process: Any) -> None:
    server = parrot_process
    texts = [f"{number} " * 400 for number in range(40)]
    whole = {"model": MODEL, "messages": CHAT}

    def ask() -> tuple[list[Any], str]:
        vectors = server.sdk().embeddings.create(model=MODEL, input=texts).data
        answer = server.sdk().chat.completions.create(**whole)
        return [vector.embedding for vector in vectors], answer.choices[0].message.content

    alone = ask()
    assert alone[1] == SAID
    streams = server.client._streams
    lose, lost = streams.lose, []  # how many embeddings each engine had when it died

    def noting(*about: Any) -> Any:
        lost.append(sum(bool(request.pooling) for request in streams.requests))
        return lose(*about)

    streams.lose = noting
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        server.until(lambda: server.client.in_flight >= len(texts) // 2)
        kill(server)
        server.until(lambda: server.client.stats.computed_tokens > 0)
        kill(server)
        assert [asking.result() for asking in asked] == [alone] * 2
    assert min(lost) > 0, "both kills must have hit embeddings"


def test_health_tells_the_truth(parrot_process: Any) -> None:
    server = parrot_process
    pid = server.client.hello.pid
    assert server.client.stats.generated_tokens == 0
    health = server.get("/health?generate=1").json()
    assert (health["status"], health["engine"]) == ("ok", {"pid": pid, "model": MODEL})
    assert [model["generated"] for model in health["models"]] == ["probe"]
    assert server.client.stats.generated_tokens == 1
    seen = set()
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(server.post, "/v1/chat/completions", model=MODEL, messages=CHAT)
        while not asking.done():
            answer = server.get("/health")
            seen.add((answer.status_code, answer.json()["status"], answer.json()["engine"] is None))
        assert asking.result().json()["choices"][0]["message"]["content"] == SAID
    assert seen == {(200, "ok", False), (503, "resuming", True)}
    health = server.get("/health").json()
    assert health["engine"]["pid"] not in (pid, os.getpid())
    metrics = server.get("/metrics").text
    assert "penstock_engine_restarts_total 1.0" in metrics
    assert "penstock_adopted_blocks_total" in metrics


def test_without_an_engine_the_answer_is_503(mortal_parrot: Any) -> None:
    server = mortal_parrot
    pid = kill(server)
    server.until(lambda: server.client.state == "failed")
    assert server.get("/health").status_code == 503
    health = server.get("/health").json()
    assert health["engine"] is None
    assert health["status"] == "failed"
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


def test_a_whole_answer_under_way_becomes_a_503_if_there_is_no_next_engine(mortal_parrot: Any) -> None:
    server = mortal_parrot
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(server.post, "/v1/chat/completions", **ENDLESS)
        server.until(lambda: server.client.stats.running == 1)
        kill(server)
        answer = asking.result(30)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_died"

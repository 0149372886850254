"""A stream that the end of the server cuts ends with an error in its dialect, so that its client knows that something
is missing. What DrainingServer does when its time is over is done here while the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.types.messages import Abort
from tests.server.test_restart import MODEL

SAY = "[*abc]"
CHAT = [{"role": "user", "content": SAY}]
REASON = "the server is stopping"
OPENAI = {"error": {"message": REASON, "type": "server_error", "param": None, "code": "server_stopping"}}

CUT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # path, body, and what the last event must have
    "openai": ("/v1/chat/completions", {"messages": CHAT}, OPENAI),
    "openai, two choices": ("/v1/chat/completions", {"messages": CHAT, "n": 2}, OPENAI),
    "openai, text": ("/v1/completions", {"prompt": SAY, "max_tokens": 9000}, OPENAI),
    "anthropic": (
        "/v1/messages",
        {"messages": CHAT, "max_tokens": 9000},
        {"type": "error", "error": {"type": "overloaded_error", "message": REASON}},
    ),
    "responses": ("/v1/responses", {"input": SAY}, {"type": "response.failed"}),
    "ollama": ("/api/chat", {"messages": CHAT}, {"error": REASON}),
    "ollama, text": ("/api/generate", {"prompt": SAY, "raw": True}, {"error": REASON}),
    "llama.cpp": (
        "/completion",
        {"prompt": SAY},
        {"error": {"code": 503, "message": REASON, "type": "unavailable_error"}},
    ),
    "sglang": ("/generate", {"text": SAY, "sampling_params": {"max_new_tokens": 9000}}, OPENAI),
    "tgi": (
        "/generate_stream",
        {"inputs": SAY, "parameters": {"max_new_tokens": 9000}},
        {"error": REASON, "error_type": "overloaded"},
    ),
    "kserve": (
        "/v2/models/toy%2Fparrot/generate_stream",
        {"text_input": SAY, "max_tokens": 9000},
        {"error": REASON},
    ),
}


@pytest.mark.parametrize("dialect", CUT)
def test_a_stream_that_is_cut_says_so(slow_parrot: Any, dialect: str) -> None:
    path, body, expected = CUT[dialect]
    client = slow_parrot.client
    with slow_parrot.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as answer:
        lines = answer.iter_lines()
        next(lines)
        client._loop.call_soon_threadsafe(client.end_answers, REASON)
        *_, last = [line for line in lines if line]
    event = json.loads(last.removeprefix("data:"))
    assert expected.items() <= event.items()
    if dialect == "responses":
        assert event["response"]["status"] == "failed"
        assert event["response"]["error"] == {"code": "server_error", "message": REASON}
    for id in range(client.next_id()):
        client._engine.send(Abort(id))  # a server that stops does not
    slow_parrot.until_idle()

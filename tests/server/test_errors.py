"""Bad requests: OpenAI's error shape, the right status, the field's name, quickly."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples

MODEL = "toy/parrot"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "[hello]"}]}
PART = {"type": "image_url", "image_url": {"url": "x"}}


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"].startswith("req-")
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"temperature": "hot"}, "temperature", "Expected float | null, got str"),
        ({"temperature": -1}, "temperature", "between 0.0 and 100.0; got -1"),
        ({"top_p": 1.5}, "top_p", "1.5"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"min_p": 2}, "min_p", "2"),
        ({"presence_penalty": 3}, "presence_penalty", "3"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "between 0.01 and 100"),
        ({"max_tokens": 1.5}, "max_tokens", "got float"),
        ({"max_tokens": True}, "max_tokens", "got bool"),
        ({"max_tokens": -2}, "max_tokens", "-2"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"max_tokens": 10**6}, "max_tokens", "holds 512"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "<= 128"),
        ({"seed": 2**70}, "seed", "int"),
        ({"stop": ""}, "stop", "not be empty"),
        ({"stop": ["a", 1]}, "stop[1]", "Expected str, got int"),
        ({"stop": ["x"] * 33}, "stop", "at most 32"),
        ({"stop_token_ids": [257]}, "stop_token_ids", "from 0 to 256; got 257"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "got 999"),
        ({"logit_bias": {"a": "b"}}, "logit_bias[...]", "got str"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
        ({"logprobs": 3}, "logprobs", "Expected bool | null, got int"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"stream": 1}, "stream", "got int"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "unknown field"),
        ({"no_such_field": 1}, "no_such_field", "unknown field 'no_such_field'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "custom", "function": {}}]}, "tools[0].type", "custom"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools", "128"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict", "bool"),
        ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not in tools"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "not supported"),
        ({"tools": [TOOL], "guided_regex": "a"}, "tools", "cannot be combined"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood", "not supported"),
        ({"guided_json": []}, "guided_json", "got array"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"guided_yaml": {}}, "guided_yaml", "unknown field"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"store": 0}, "store", "Expected bool"),  # which is no false
        ({"service_tier": "gold"}, "service_tier", "gold"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hi"}, "messages", "Expected array, got str"),
        ({"messages": ["hi"]}, "messages[0]", "got str"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown field"),
        ({"messages": [{"role": "user", "content": [PART]}]}, "messages[0].content[0].type", "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
            "missing",
        ),
    ],
)
def test_chat_refuses_by_name(strict_parrot: Any, fields: dict[str, Any], param: str, told: str) -> None:
    error = refused(strict_parrot.post(CHAT, model=MODEL, **{**HELLO, **fields}))
    assert error["param"] == param
    assert told in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": None}, "prompt", "got null"),
        ({"prompt": 5}, "prompt", "got int"),
        ({"prompt": ["a", 5]}, "prompt", "list of token ids"),
        ({"prompt": [1, 257]}, "prompt", "from 0 to 256; got 257"),
        ({"prompt": [-1]}, "prompt", "got -1"),
        ({"prompt": [[1], [2**80]]}, "prompt", "got"),
        ({"prompt": ["a"] * 1025}, "prompt", "1024"),
        ({"prompt": ["a"] * 100, "n": 11}, "prompt", "1024"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"prompt": "a", "best_of": 2, "n": 3}, "best_of", "at least n"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "got bool"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "21"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "unless echo"),
        ({"prompt": "a", "max_tokens": 512}, "max_tokens", "together 513"),
        ({"prompt": "a", "messages": []}, "messages", "unknown field"),
        ({"prompt": "x" * 512}, "prompt", "has 512 tokens; the context holds 512"),
        ({"prompt": ["a", "x" * 5000]}, "prompt", "has 5000 tokens"),
        ({"prompt": "x" * 513, "max_tokens": 0, "echo": True}, "prompt", "has 513 tokens"),
    ],
)
def test_completions_refuses_by_name(strict_parrot: Any, fields: dict[str, Any], param: str, told: str) -> None:
    error = refused(strict_parrot.post(COMPLETIONS, model=MODEL, **fields))
    assert error["param"] == param
    assert told in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"temperature": 1e999}', b'{"a": NaN}'])
def test_a_body_that_is_not_json(parrot: Any, body: bytes) -> None:
    error = refused(parrot.http.post(CHAT, content=body))
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize("body", [[1], "hi", None, 3])
def test_a_body_that_is_not_an_object(parrot: Any, body: Any) -> None:
    assert refused(parrot.http.post(CHAT, content=json.dumps(body)))["code"] == "invalid_type"


def test_a_body_too_large_is_refused_with_both_numbers(parrot: Any) -> None:
    error = refused(parrot.http.post(CHAT, content=b" " * (2**24 + 1)), 413)
    assert error["code"] == "request_too_large"
    assert str(2**24 + 1) in error["message"]
    assert str(2**24) in error["message"]


def test_the_model_must_be_the_one_served(parrot: Any) -> None:
    error = refused(parrot.post(CHAT, model="other", **HELLO), 404)
    assert error["code"] == "model_not_found"
    assert "'other'" in error["message"]
    assert MODEL in error["message"]


def test_no_such_route_and_not_that_method(parrot: Any) -> None:
    assert refused(parrot.get("/v1/nothing"), 404)["code"] == "not_found"
    assert refused(parrot.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    assert refused(parrot.get("/v1/models/nope"), 404)["code"] == "model_not_found"


def test_a_bug_is_an_error_like_any_other(parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("penstock.server.openai.chat.ChatWriter", broken)
    error = refused(parrot.post(CHAT, model=MODEL, **HELLO), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]


def test_refusals_leave_nothing_behind(parrot: Any) -> None:
    parrot.until_idle()
    assert parrot.client.stats.blocks_used == 0


AWKWARD = [None, True, -1, 0, 1, 2**31, 2**64, 0.5, -0.5, 1e30, "", "x", "\ud800", [], [1], ["x"], [None], {}, {"1": 1}]
NAMES = [
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "stop", "stop_token_ids", "max_tokens", "min_tokens", "ignore_eos", "n", "stream"),
    *("stream_options", "logprobs", "top_logprobs", "echo", "best_of", "suffix", "user", "metadata", "tools"),
    *("prompt", "messages", "model", "max_completion_tokens", "response_format", "nonsense"),
]


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(AWKWARD), max_size=3),
    path=st.sampled_from([CHAT, COMPLETIONS]),
)
def test_no_field_can_break_the_server(parrot: Any, fields: dict[str, Any], path: str) -> None:
    asked = HELLO if path == CHAT else {"prompt": "[hello]"}
    answer = parrot.http.post(path, content=json.dumps({"model": MODEL, "max_tokens": 3} | asked | fields))
    if answer.status_code != 200:
        refused(answer, 404 if answer.status_code == 404 else 400)

"""Anthropic's own SDK is the judge: what it reads from our answers, streamed and whole, and what it raises."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import cache
from typing import Any

import anthropic
import httpx
import pytest

MODEL = "toy/parrot"
WAIT = 120.0


def sdk(server: Any, **how: Any) -> anthropic.Anthropic:
    return opened(server.url, **how)


@cache
def opened(url: str, **how: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": url, "api_key": "none", "max_retries": 0, "timeout": WAIT} | how)


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": f"[{text}]"}]} | fields


def events(server: Any, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """As they are on the wire: each event's name and data."""
    answer = server.post("/v1/messages", stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [event.split("\n") for event in answer.text.split("\n\n")[:-1]]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in lines)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


TEXTS = ["hello", "naïve café", "漢字かな交じり文", "👩‍👩‍👧 family", 'quotes " and \\ slashes\n']


@pytest.mark.parametrize("text", TEXTS)
def test_whole_and_streamed_read_the_same(parrot: Any, text: str) -> None:
    client = sdk(parrot)
    whole = client.messages.create(**say(text))
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", MODEL)
    assert [block.text for block in whole.content] == [text]
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    with client.messages.stream(**say(text)) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens == len(text.encode()) + 1


def test_async_whole_and_streamed(parrot: Any) -> None:
    async def scenario() -> None:
        how = {"base_url": parrot.url, "api_key": "none", "max_retries": 0, "timeout": WAIT}
        async with anthropic.AsyncAnthropic(**how) as client:
            whole, stream = await asyncio.gather(
                client.messages.create(**say("one")), client.messages.create(**say("two"), stream=True)
            )
            assert whole.content[0].text == "one"
            assert [event.type async for event in stream][-1] == "message_stop"
            async with client.messages.stream(**say("three")) as parsed:
                assert (await parsed.get_final_message()).content[0].text == "three"
            assert (await client.messages.count_tokens(**say_count("four"))).input_tokens > 4

    asyncio.run(scenario())


def say_count(text: str) -> dict[str, Any]:
    return {name: value for name, value in say(text).items() if name != "max_tokens"}


def test_the_order_of_events(parrot: Any) -> None:
    told = events(parrot, **say("abc"))
    names = [name for name, _ in told]
    assert all(name == data["type"] for name, data in told)
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    start, end = told[0][1]["message"], told[-2][1]
    assert set(start) >= {"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"}
    assert start["content"] == []
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] > 10
    assert told[2][1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert told[3][1] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 4


def test_an_empty_answer_has_no_blocks(parrot: Any) -> None:
    assert sdk(parrot).messages.create(**say("")).content == []
    names = [name for name, _ in events(parrot, **say(""))]
    assert names == ["message_start", "ping", "message_delta", "message_stop"]


def test_limits_and_stop_sequences(parrot: Any) -> None:
    client = sdk(parrot)
    short = client.messages.create(**say("hello", max_tokens=3))
    assert (short.content[0].text, short.stop_reason) == ("hel", "max_tokens")
    stopped = client.messages.create(**say("one, two", stop_sequences=["zzz", ","]))
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one", "stop_sequence", ",")
    told = events(parrot, **say("one, two", stop_sequences=[","]))
    assert told[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": ","}


def test_the_end_of_the_context_is_said(parrot: Any) -> None:
    answer = sdk(parrot).messages.create(**say("*abc", max_tokens=32000))
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens + answer.usage.output_tokens == 512


def test_usage_tells_what_was_reused(parrot: Any) -> None:
    client = sdk(parrot)
    asked = say("a prompt that fills several blocks of sixteen tokens, so that some are reused")
    count = client.messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens
    first, again = client.messages.create(**asked).usage, client.messages.create(**asked).usage
    for usage in (first, again):
        assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == count
    assert again.cache_read_input_tokens == (count - 1) // 16 * 16
    assert again.cache_read_input_tokens > first.cache_read_input_tokens


def prompt_of(parrot: Any, **fields: Any) -> int:
    return sdk(parrot).messages.count_tokens(**{"model": MODEL} | fields).input_tokens


def test_system_and_content_as_text_or_blocks(parrot: Any) -> None:
    plain = prompt_of(parrot, system="be brief", messages=[{"role": "user", "content": "hi"}])
    blocks = prompt_of(
        parrot,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    )
    assert plain == blocks == len("system:be brief\nuser:hi\nassistant:")
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of(parrot, messages=[{"role": "user", "content": two}]) == len("user:a\nb\nassistant:")


TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
USED: list[dict[str, Any]] = [
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I should look.", "signature": ""},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"far": True}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "fog"}]},
            {"type": "text", "text": "[well]"},
        ],
    },
]


def test_tools_used_before_are_part_of_the_prompt(parrot: Any) -> None:
    answer = sdk(parrot).messages.create(model=MODEL, max_tokens=9, messages=USED)
    assert answer.content[0].text == "well"
    told = "user:look\nassistant:Looking.\ntool:fog\nuser:[well]\nassistant:"
    assert prompt_of(parrot, messages=USED) == len(told)
    assert prompt_of(parrot, messages=USED, tools=[TOOL]) == len(told)


@pytest.mark.parametrize("name", ["claude-opus-4-6", "claude-sonnet-5"])
def test_claude_stands_for_the_served_model(parrot: Any, name: str) -> None:
    assert sdk(parrot).messages.create(**say("hi", model=name)).model == MODEL


def test_both_ways_to_send_a_key_and_the_beta_query(parrot: Any) -> None:
    for how in ({"api_key": "none"}, {"api_key": None, "auth_token": "none"}):
        assert sdk(parrot, **how).messages.create(**say("hi")).content[0].text == "hi"
    for headers in ({"x-api-key": "k"}, {"authorization": "Bearer k", "anthropic-version": "2026-10-21"}):
        answer = parrot.http.post("/v1/messages?beta=true", json=say("hi"), headers=headers)
        assert answer.status_code == 200
        assert answer.headers["request-id"].startswith("req-")


def test_models_for_both_sdks(parrot: Any) -> None:
    client = sdk(parrot)
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert model.created_at.tzinfo is not None
    assert client.models.retrieve(MODEL) == model
    (known,) = parrot.sdk().models.list()
    assert (known.id, known.object, known.owned_by) == (MODEL, "model", "penstock")
    assert parrot.sdk().models.retrieve(MODEL).created == known.created
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        client.models.retrieve("other")


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": 0}, "max_tokens: Expected int >= 1"),
        ({"extra_body": {"temperature": -1}}, "temperature must be between"),
        ({"extra_body": {"top_p": 2}}, "top_p must be between"),
        ({"stop_sequences": [""]}, "stop strings must not be empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\[0\].content\[0\].type: 'image'"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "no text that could be continued"),
        ({"messages": [USED[2]]}, "no tool_use block before it has the id 'toolu_1'"),
        ({"system": [{"type": "tool_result"}]}, r"system\[0\].type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
        ({"output_config": {"effort": "low"}}, "output_config.effort is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type is not supported"),
        ({"tools": [TOOL | {"strict": "very"}]}, r"tools\[0\].strict: Expected bool"),
        ({"tool_choice": {"type": "any"}}, "tools is empty"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "leap"}}, "'leap', which is not in tools"),
        ({"extra_body": {"no_such_field": 1}}, "unknown field 'no_such_field'"),
    ],
)
def test_refusals_are_told_by_name(strict_parrot: Any, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=told) as caught:
        sdk(strict_parrot).messages.create(**say("hi", **fields))
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == caught.value.request_id


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status
    assert set(answer.json()) == {"type", "error", "request_id"}
    kind: str = answer.json()["error"]["type"]
    return kind


def test_other_errors_in_its_shape(parrot: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        sdk(parrot).messages.create(**say("hi", model="gpt"))
    assert refused(parrot.post("/v1/messages", **say("hi", model="gpt")), 404) == "not_found_error"
    assert refused(parrot.http.post("/v1/messages", content=b"{"), 400) == "invalid_request_error"
    assert refused(parrot.http.post("/v1/messages", content=b" " * (17 << 20)), 413) == "request_too_large"
    assert refused(parrot.get("/v1/messages"), 405) == "invalid_request_error"
    missing = parrot.post("/v1/messages", model=MODEL, messages=[{"role": "user", "content": "x"}])
    assert refused(missing, 400) == "invalid_request_error"
    assert "'max_tokens' is missing" in missing.json()["error"]["message"]


def test_a_prompt_too_long_is_refused_with_the_numbers(parrot: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="context holds 512"):
        sdk(parrot).messages.create(**say("x" * 600))


def test_an_engine_that_dies_is_told_in_the_stream_and_after(mortal_parrot: Any) -> None:
    client = sdk(mortal_parrot)
    with client.messages.create(**say("*abc", max_tokens=30_000), stream=True) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
        os.kill(mortal_parrot.get("/health").json()["engine"]["pid"], signal.SIGKILL)
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(stream)
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"
    mortal_parrot.until(lambda: mortal_parrot.client.hello is None)
    with pytest.raises(anthropic.OverloadedError):
        client.messages.create(**say("hi"))

"""What an older anthropic reads from our answers: run by test_older_sdks.py beside that version alone."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import anthropic
import pytest

URL, VERSION, MODEL, CALL = sys.argv[1:]
TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
how: Any = {"base_url": URL, "api_key": "none", "max_retries": 0, "timeout": 30.0}
sdk = anthropic.Anthropic(**how)


def say(text: str, **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": f"[={text.encode().hex()}]"}]
    return {"model": MODEL, "max_tokens": 300, "messages": said} | fields


def messages() -> None:
    whole = sdk.messages.create(**say("naïve 漢字"))
    assert [block.text for block in whole.content] == ["naïve 漢字"]
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn")
    with sdk.messages.stream(**say("naïve 漢字")) as stream:
        assert "".join(stream.text_stream) == "naïve 漢字"
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in sdk.messages.create(**say("hi"), stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    short = sdk.messages.create(**say("hello", max_tokens=2, system="be brief"))
    assert short.stop_reason == "max_tokens"
    assert sdk.messages.create(**say("one, two", stop_sequences=[","])).stop_sequence == ","
    assert sdk.messages.create(**say("hi", model="claude-by-any-name")).model == MODEL


def tools() -> None:
    whole = sdk.messages.create(**say(CALL, tools=[TOOL]))
    (call,) = whole.content
    assert whole.stop_reason == "tool_use"
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Zürich"})
    with sdk.messages.stream(**say(CALL, tools=[TOOL])) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == {"city": "Zürich"}
    used = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}
    turns = [
        {"role": "user", "content": "How is it there?"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "[It rains.]"}]},
    ]
    assert sdk.messages.create(**say("", messages=turns, tools=[TOOL])).content[0].text == "It rains."


def counted() -> None:
    told = sdk.messages.count_tokens(model=MODEL, messages=say("hi")["messages"])
    usage = sdk.messages.create(**say("hi")).usage
    assert told.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def errors() -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as refused:
        sdk.messages.create(**say("x", max_tokens=0))
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as absent:
        sdk.messages.create(**say("x", model="nobody", stream=True))
    assert absent.value.body["error"]["type"] == "not_found_error"


def models() -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).type == "model"


async def at_once() -> None:
    async with anthropic.AsyncAnthropic(**how) as client:
        assert (await client.messages.create(**say("one"))).content[0].text == "one"
        async with client.messages.stream(**say("two")) as stream:
            assert "".join([text async for text in stream.text_stream]) == "two"


assert anthropic.__version__ == VERSION
for judged in (messages, tools, counted, errors, models):
    judged()
asyncio.run(at_once())
print("judged")

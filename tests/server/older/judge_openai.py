"""What an older openai reads from our answers: run by test_older_sdks.py beside that version alone."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
import pytest

URL, VERSION, MODEL, CALL = sys.argv[1:]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
how: Any = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "timeout": 30.0}
sdk = openai.OpenAI(**how)


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": f"[={text.encode().hex()}]"}]


def chat() -> None:
    whole = sdk.chat.completions.create(model=MODEL, messages=said("naïve 👩‍👩‍👧"))
    assert whole.choices[0].message.content == "naïve 👩‍👩‍👧"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = sdk.chat.completions.create(
        model=MODEL, messages=said("naïve 👩‍👩‍👧"), stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "naïve 👩‍👩‍👧"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    scored = sdk.chat.completions.create(model=MODEL, messages=said("ab"), logprobs=True, top_logprobs=2)
    assert [entry.token for entry in scored.choices[0].logprobs.content] == ["a", "b"]


def completions() -> None:
    whole = sdk.completions.create(model=MODEL, prompt=["[one]", "[two]"], max_tokens=20)
    assert [choice.text for choice in whole.choices] == ["one", "two"]
    stream = sdk.completions.create(model=MODEL, prompt="[three]", max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "three"


def tools() -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": said(CALL), "tools": [TOOL]}
    whole = sdk.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    pieces = [
        piece
        for chunk in sdk.chat.completions.create(**asked, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert {piece.index for piece in pieces} == {0}
    assert [piece.function.name for piece in pieces if piece.id] == ["weather"]
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    turns: list[Any] = [
        {"role": "user", "content": "How is it there?"},
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "[It rains.]"},
    ]
    told = sdk.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL])
    assert told.choices[0].message.content == "It rains."


def errors() -> None:
    with pytest.raises(openai.BadRequestError, match="-1") as refused:
        sdk.chat.completions.create(model=MODEL, messages=said("x"), temperature=-1)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    assert refused.value.request_id
    with pytest.raises(openai.NotFoundError) as absent:
        sdk.chat.completions.create(model="nobody", messages=said("x"), stream=True)
    assert absent.value.code == "model_not_found"


def models() -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).object == "model"


async def at_once() -> None:
    async with openai.AsyncOpenAI(**how) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=said("one"))
        assert whole.choices[0].message.content == "one"
        stream = await client.chat.completions.create(model=MODEL, messages=said("two"), stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "two"


assert openai.__version__ == VERSION
for judged in (chat, completions, tools, errors, models):
    judged()
asyncio.run(at_once())
print("judged")

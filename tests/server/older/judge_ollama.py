"""What an older ollama reads from our answers: run by test_older_sdks.py beside that version alone."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version
from typing import Any

import ollama
import pytest

URL, VERSION, MODEL, CALL = sys.argv[1:]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "", "parameters": CITY}}
sdk = ollama.Client(URL, timeout=30.0)


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": f"[={text.encode().hex()}]"}]


def chat() -> None:
    whole = sdk.chat(MODEL, said("naïve 漢字"), options={"temperature": 0.5, "num_predict": 50})
    assert (whole.message.role, whole.message.content, whole.done_reason) == ("assistant", "naïve 漢字", "stop")
    assert whole.eval_count
    assert whole.total_duration
    lines = list(sdk.chat(MODEL, said("naïve 漢字"), stream=True))
    assert "".join(line.message.content or "" for line in lines) == "naïve 漢字"
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]


def generate() -> None:
    assert sdk.generate(MODEL, "[hello]").response == "hello"
    assert "".join(line.response for line in sdk.generate(MODEL, "[hello]", stream=True)) == "hello"


def tools() -> None:
    (call,) = sdk.chat(MODEL, said(CALL), tools=[TOOL]).message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Zürich"})
    streamed = [line.message.tool_calls for line in sdk.chat(MODEL, said(CALL), tools=[TOOL], stream=True)]
    assert [calls[0].function.arguments for calls in streamed if calls] == [{"city": "Zürich"}]
    turns: list[Any] = [
        {"role": "user", "content": "How is it there?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "[It rains.]"},
    ]
    assert sdk.chat(MODEL, turns, tools=[TOOL]).message.content == "It rains."


def models() -> None:
    assert [model.model for model in sdk.list().models][:1] == [f"{MODEL}:latest"]
    assert [model.model for model in sdk.ps().models] == [f"{MODEL}:latest"]
    assert sdk.show(MODEL).modelinfo is not None


def errors() -> None:
    for wrong, status in (({"model": "nobody"}, 404), ({"options": {"temperature": -1}}, 400)):
        with pytest.raises(ollama.ResponseError) as refused:
            sdk.chat(**{"model": MODEL, "messages": said("x")} | wrong)
        assert refused.value.status_code == status


async def at_once() -> None:
    client = ollama.AsyncClient(URL, timeout=30.0)
    assert (await client.chat(MODEL, said("one"))).message.content == "one"
    stream = await client.chat(MODEL, said("two"), stream=True)
    assert "".join([line.message.content async for line in stream]) == "two"


assert version("ollama") == VERSION
for judged in (chat, generate, tools, models, errors):
    judged()
asyncio.run(at_once())
print("judged")

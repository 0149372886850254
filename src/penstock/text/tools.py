"""Tools in a chat's messages: arguments as templates take them, and words for templates that know no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


class CallArguments(dict[str, Any]):
    """A call's arguments. Some templates walk through them or make JSON of them, others put them down as text: where a
    text is wanted, they are JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def describe(tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[Message]:
    """The chat with the tools told in words, for a template that has no place for them: before the first thing a user
    says, which is where every template lets text stand."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
    told = {**messages[first], "content": f"{_ABOUT_TOOLS}\n{functions}\n\n{messages[first]['content'] or ''}"}
    return [*messages[:first], told, *messages[first + 1 :]]


_ABOUT_TOOLS = (
    'You can call functions. To call one, answer with nothing but {"name": its name, "arguments": {its arguments}}. '
    "The functions are:"
)


def narrate(messages: Sequence[Message]) -> list[Message]:
    """The chat with calls and results told as text, for a template that knows none."""
    return [_narrated(message) for message in messages]


def _narrated(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"The function returned: {message['content']}"}
    if not message.get("tool_calls"):
        return message
    calls = [_call(call["function"]) for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([message["content"] or "", *calls]).strip()}


def _call(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)

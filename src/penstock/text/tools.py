"""Prepares tools in chat messages: arguments as templates expect them, and text for templates without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.text.tool_formats import ToolPrompt

MessageDict = Mapping[str, Any]  # {"role": ..., "content": ...}


def describe(
    tools: Sequence[Mapping[str, Any]], messages: Sequence[MessageDict], prompt: ToolPrompt | None = None
) -> list[MessageDict]:
    """Adds a description of the tools to the chat, for a template that does not support them: a system message if the
    model has its own tool prompt, else text before the first user message, which every template allows.
    """
    if prompt is not None:
        first = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
        told = {
            "role": "system",
            "content": prompt.before + "".join(_told(tool, prompt) for tool in tools) + prompt.after,
        }
        return [*messages[:first], told, *messages[first:]]
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
    described = {**messages[first], "content": f"{_ABOUT_TOOLS}\n{functions}\n\n{messages[first]['content'] or ''}"}
    return [*messages[:first], described, *messages[first + 1 :]]


def _told(tool: Mapping[str, Any], prompt: ToolPrompt) -> str:
    function = tool["function"]
    parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
    return prompt.each.format(
        name=function["name"], description=function.get("description") or "", parameters=parameters
    )


_ABOUT_TOOLS = (
    'You can call functions. To call one, answer with nothing but {"name": its name, "arguments": {its arguments}}. '
    "The functions are:"
)


def calls_as_text(
    messages: Sequence[MessageDict], around: tuple[str, str] = ("", ""), results: bool = True
) -> list[MessageDict]:
    """Returns the chat with calls, between markers, and `results` as text, for a template that does not support
    them.
    """
    return [_as_text(message, around, results) for message in messages]


def _as_text(message: MessageDict, around: tuple[str, str], results: bool) -> MessageDict:
    if message["role"] == "tool" and results:
        return {"role": "user", "content": f"The function returned: {message['content']}"}
    if not message.get("tool_calls"):
        return message
    calls = [_call(call["function"]).join(around) for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([message["content"] or "", *calls]).strip()}


def _call(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)

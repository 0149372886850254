"""A server whose model says what a script tells it to say, in the tool format of a real model.

Requests, tools, prompts, streams and answers are those of the real server. Only the model is played: its tokens are
bytes, and the script reads a rendered conversation and writes the answer to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from penstock.text import ChatPrompt
from tests.server import toys

Messages = Sequence[dict[str, Any]]
Script = Callable[[Messages, list[str]], str]  # the conversation and the names of its tools -> the answer


class ScriptedText(toys.Hermes):
    """Renders a conversation as the answer that the script has for it, which the toy then says."""

    def __init__(self, script: Script) -> None:
        super().__init__("enable_thinking")
        self._script = script
        self.seen: list[tuple[Messages, list[str]]] = []

    def chat_prompt(self, messages: Any, **kwargs: Any) -> ChatPrompt:
        names = [tool["function"]["name"] for tool in kwargs.get("tools") or ()]
        self.seen.append((messages, names))
        answer = self._script(messages, names)
        return ChatPrompt(self.encode_prompt(f"[={answer.encode().hex()}]assistant:"))


def call(name: str, **arguments: Any) -> str:
    """A tool call as Hermes' models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def results(messages: Messages) -> list[str]:
    """What the tools have answered so far."""
    return [str(message["content"]) for message in messages if message["role"] == "tool"]

"""Reads the messages of a chat in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import MAX_MESSAGES, check_count
from penstock.server.chat.tools import PastCall, read_calls, template_reasoning
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.content import PART_NO_EFFECT, ChatRefusalPart, ChatTextPart, read_content
from penstock.server.http.bodies import ContentValues, NoEffect, read_object
from penstock.server.http.openapi import read_as

MESSAGE_NO_EFFECT: NoEffect = {"annotations": ([],), "audio": ContentValues(), "function_call": ContentValues()}


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | list[Annotated[dict[str, Any], read_as(ChatTextPart, ChatRefusalPart, no_effect=PART_NO_EFFECT)]] | None
    ) = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Annotated[dict[str, Any], read_as(PastCall)]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


def read_messages(context: RequestContext, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as chat templates take them: a role and a text each, an assistant's reasoning and calls."""
    if not given:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    check_count(given, MAX_MESSAGES, "messages")
    return [_message(context, message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(context: RequestContext, given: dict[str, Any], where: str) -> dict[str, Any]:
    message = read_object(context, given, ChatMessage, MESSAGE_NO_EFFECT, where)
    role = "system" if message.role == "developer" else message.role
    if message.content is None and message.refusal is not None:
        message.content = message.refusal
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(
            f"the field '{where}.content' is missing", param=f"{where}.content", code="missing_required_parameter"
        )
    content = read_content(context, message.content, message.role, f"{where}.content")
    reasoning = message.reasoning_content or message.reasoning
    calls = read_calls(context, message.tool_calls, f"{where}.tool_calls") if message.tool_calls else None
    named = {"name": message.name, "tool_call_id": message.tool_call_id, "tool_calls": calls}
    rendered = {"role": role, "content": content} | {name: value for name, value in named.items() if value is not None}
    return rendered | template_reasoning(reasoning, content) if reasoning else rendered

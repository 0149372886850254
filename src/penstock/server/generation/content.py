"""Reads the content of chat messages as text. A part other than text is refused, or replaced by a note if a tool
returned it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.server.access.bounds import MAX_PARTS, check_count
from penstock.server.chat.tools import left_out_text
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import ANY_VALUE, NoEffect, leave_out, read_object, unsupported

PART_NO_EFFECT: NoEffect = {"prompt_cache_breakpoint": ANY_VALUE}


class ChatTextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatRefusalPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["refusal"]
    refusal: str


def read_content(
    context: RequestContext, content: str | list[dict[str, Any]] | None, role: str, where: str
) -> str | None:
    if not isinstance(content, list):
        return content
    check_count(content, MAX_PARTS, where)
    return "\n".join(_part(context, part, role, f"{where}[{index}]") for index, part in enumerate(content))


def _part(context: RequestContext, part: dict[str, Any], role: str, where: str) -> str:
    match part.get("type"):
        case "text":
            return read_object(context, part, ChatTextPart, PART_NO_EFFECT, where).text
        case "refusal":
            return read_object(context, part, ChatRefusalPart, PART_NO_EFFECT, where).refusal
        case str(kind) if role == "tool":
            leave_out(context, where, kind)
            return left_out_text(kind)
        case kind:
            raise unsupported(f"{where}.type", kind)

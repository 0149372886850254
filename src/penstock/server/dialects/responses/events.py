"""Declares the events of a streamed response. Each has its type as the event's name, and a number from 0 on."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, cast

import msgspec

from penstock.server.chat.logprobs import TokenEntry
from penstock.server.dialects.responses.items import Item, OutputText, ReasoningText, ResponseObject
from penstock.server.http.sse import encode


class ResponseEvent(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int = 0


class LifecycleEvent(ResponseEvent):
    response: ResponseObject


def _lifecycle(status: str) -> type[LifecycleEvent]:
    name = "Response" + status.title().replace("_", "")
    return cast("type[LifecycleEvent]", msgspec.defstruct(name, [], bases=(LifecycleEvent,), tag=f"response.{status}"))


STATUSES = ("created", "queued", "in_progress", "completed", "incomplete", "failed", "cancelled")
LIFECYCLE = {status: _lifecycle(status) for status in STATUSES}


class ItemAdded(ResponseEvent, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(ResponseEvent, tag="response.output_item.done"):
    output_index: int
    item: Item


class ItemEvent(ResponseEvent):
    item_id: str
    output_index: int


class PartEvent(ItemEvent):
    content_index: int


class PartAdded(PartEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(PartEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(PartEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenEntry]


class OutputTextDone(PartEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenEntry]


class ReasoningDelta(PartEvent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(PartEvent, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    arguments: str


class CustomInputDelta(ItemEvent, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(ItemEvent, tag="response.custom_tool_call_input.done"):
    input: str


class ReadingFailed(ResponseEvent, tag="error"):
    """Reports to one reader why its events end. The response itself may continue."""

    code: str
    message: str
    param: str | None = None


IN_PROGRESS = ItemAdded | ItemDone | PartAdded | PartDone | OutputTextDelta | OutputTextDone | ReasoningDelta
IN_PROGRESS |= ReasoningDone | ArgumentsDelta | ArgumentsDone | CustomInputDelta | CustomInputDone
EVENTS: Any = reduce(or_, LIFECYCLE.values(), IN_PROGRESS | ReadingFailed)


def framed(event: ResponseEvent) -> bytes:
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\ndata: " + encode(event) + b"\n\n"

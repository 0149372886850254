"""The events of a streamed response. Each has its type as the event's name, and a number from 0 on."""

from __future__ import annotations

import msgspec

from penstock.server.chat.logprobs import TokenEntry
from penstock.server.responses.items import Item, OutputText, ReasoningText, ResponseObject
from penstock.server.sse import encode


class ResponseEvent(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int = 0


class LifecycleEvent(ResponseEvent):
    response: ResponseObject


class ResponseCreated(LifecycleEvent, tag="response.created"):
    pass


class ResponseQueued(LifecycleEvent, tag="response.queued"):
    pass


class ResponseInProgress(LifecycleEvent, tag="response.in_progress"):
    pass


class ResponseCompleted(LifecycleEvent, tag="response.completed"):
    pass


class ResponseIncomplete(LifecycleEvent, tag="response.incomplete"):
    pass


class ResponseFailed(LifecycleEvent, tag="response.failed"):
    pass


class ResponseCancelled(LifecycleEvent, tag="response.cancelled"):
    pass


FINAL_EVENTS: dict[str, type[LifecycleEvent]] = {  # by the status that a response ends with
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "failed": ResponseFailed,
    "cancelled": ResponseCancelled,
}


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


EVENTS = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ResponseCancelled
    | ItemAdded
    | ItemDone
    | PartAdded
)
EVENTS |= PartDone | OutputTextDelta | OutputTextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone


def framed(event: ResponseEvent) -> bytes:
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\ndata: " + encode(event) + b"\n\n"

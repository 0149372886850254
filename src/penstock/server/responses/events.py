"""The events of a streamed response. Each is told with its type as the event's name, and numbered from 0."""

from __future__ import annotations

import msgspec

from penstock.server.openai.chat import TokenEntry
from penstock.server.responses.items import Item, OutputText, ReasoningText, Response
from penstock.server.sse import encode


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int = 0


class Lifecycle(Event):
    response: Response


class Created(Lifecycle, tag="response.created"):
    pass


class Queued(Lifecycle, tag="response.queued"):
    pass


class InProgress(Lifecycle, tag="response.in_progress"):
    pass


class Completed(Lifecycle, tag="response.completed"):
    pass


class Incomplete(Lifecycle, tag="response.incomplete"):
    pass


class Failed(Lifecycle, tag="response.failed"):
    pass


class Cancelled(Lifecycle, tag="response.cancelled"):
    pass


LAST: dict[str, type[Lifecycle]] = {  # by the status that a response ends with
    "completed": Completed,
    "incomplete": Incomplete,
    "failed": Failed,
    "cancelled": Cancelled,
}


class ItemAdded(Event, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(Event, tag="response.output_item.done"):
    output_index: int
    item: Item


class InItem(Event):
    item_id: str
    output_index: int


class InPart(InItem):
    content_index: int


class PartAdded(InPart, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(InPart, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(InPart, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenEntry]


class TextDone(InPart, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenEntry]


class ReasoningDelta(InPart, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(InPart, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(InItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(InItem, tag="response.function_call_arguments.done"):
    arguments: str


EVENTS = Created | Queued | InProgress | Completed | Incomplete | Failed | Cancelled | ItemAdded | ItemDone | PartAdded
EVENTS |= PartDone | TextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone


def framed(event: Event) -> bytes:
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\ndata: " + encode(event) + b"\n\n"

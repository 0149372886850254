"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect.

Names that begin with `claude` mean the served model, whose own name the answer carries; other names must be right.
`max_tokens` is a limit: an answer that meets the context's end first says so in its stop_reason.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.server.access.bounds import check_stops
from penstock.server.anthropic.fields import (
    NEUTRAL,
    Ask,
    Conversation,
    read_grammar,
    read_messages,
    read_use,
    template_fields,
)
from penstock.server.bodies import read_body
from penstock.server.chat.chat_turn import Turn, begin, call_input, prompt_of
from penstock.server.chat.tools import ToolUse
from penstock.server.errors import anthropic_body
from penstock.server.explain import Explanation, Penstock
from penstock.server.openapi import Operation
from penstock.server.served_model import Served
from penstock.server.sse import EVENT_STREAM, Framing, Plain, encode, reply
from penstock.text import ChatPrompt, Delta
from penstock.text.parse import AnswerPart, Arguments, CallEnded, CallStarted, Content, Reasoning
from penstock.types import SamplingParams

STAND_INS = "claude"  # what names begin with that stand for whatever is served


async def messages(served: Served, http: HttpRequest) -> Response:
    asked = await read_body(http, Ask, NEUTRAL)
    sampling, use = _sampling(asked), read_use(asked)
    turn = begin(served, await _prompt(served, asked, use), use, sampling, asked.max_tokens, budget=_budget(asked))
    answer = MessageAnswer(served, turn, asked.max_tokens)
    return await reply(http, answer, turn.running, streaming=bool(asked.stream), framing=ANTHROPIC)


async def count_tokens(served: Served, http: HttpRequest) -> Response:
    asked = await read_body(http, Conversation, NEUTRAL)
    prompt = await _prompt(served, asked, read_use(asked))
    return Response(encode({"input_tokens": len(prompt.tokens)}), media_type="application/json")


# -- reading ------------------------------------------------------------------------------------------------------


async def _prompt(served: Served, asked: Conversation, use: ToolUse) -> ChatPrompt:
    if not asked.model.startswith(STAND_INS):
        served.check_model(asked.model)
    return await prompt_of(served, read_messages(asked), use, **template_fields(served, asked))


def _sampling(asked: Ask) -> SamplingParams:
    stops = check_stops(tuple(asked.stop_sequences or ()), "stop_sequences")
    given: dict[str, Any] = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
    given["grammar"] = read_grammar(asked)
    return SamplingParams(stop=stops, **{name: value for name, value in given.items() if value is not None})


def _budget(asked: Ask) -> int | None:
    return asked.thinking.budget_tokens if asked.thinking else None


# -- answering ----------------------------------------------------------------------------------------------------


class Usage(msgspec.Struct):
    input_tokens: int  # those computed: what was reused is counted apart
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # nothing to prove: what was thought is taken back as it is


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    usage: Usage
    role: str = "assistant"
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    penstock: Penstock | UnsetType = UNSET


class Event(msgspec.Struct, tag_field="type"):
    """Its type is also the event's name."""


class MessageStart(Event, tag="message_start"):
    message: Message


class Ping(Event, tag="ping"):
    pass


class BlockStart(Event, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Event, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Event, tag="content_block_stop"):
    index: int


class End(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Event, tag="message_delta"):
    delta: End
    usage: Usage
    penstock: Penstock | UnsetType = UNSET


class MessageStop(Event, tag="message_stop"):
    pass


EVENTS = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
MESSAGES = Operation(Ask, NEUTRAL, Message, EVENTS)
COUNT_TOKENS = Operation(Conversation, NEUTRAL)


def _event(event: Event) -> bytes:
    return _framed(type(event), encode(event))


def _framed(kind: type[Event], data: bytes) -> bytes:
    return b"event: " + str(kind.__struct_config__.tag).encode() + b"\ndata: " + data + b"\n\n"


def _trouble(error: PenstockError) -> bytes:
    return b"event: error\ndata: " + anthropic_body(error) + b"\n\n"


ANTHROPIC = Framing(EVENT_STREAM, bytes, b"", _trouble)


class MessageAnswer:
    """Whole or streamed, the same events make it."""

    def __init__(self, served: Served, turn: Turn, max_tokens: int) -> None:
        self._turn = turn
        self._explanation = Explanation(served, [turn.request])
        self._prompt = len(turn.request.prompt)
        self._message = Message(f"msg_{secrets.token_hex(12)}", served.name, Usage(self._prompt, 0, 0, 0))
        self._at_limit = "max_tokens" if turn.request.max_tokens == max_tokens else "model_context_window_exceeded"
        self._begun = False
        self._writing: Writing | None = None

    def take(self, choice: int, delta: Delta) -> None:
        for _ in self.chunks(choice, delta):
            pass

    def whole(self) -> Message:
        return self._message

    def chunks(self, _: int, delta: Delta) -> Iterator[bytes]:
        self._count(delta)
        if not self._begun:
            self._begun = True
            yield _event(MessageStart(self._message))
            yield _event(Ping())
        for part in self._turn.parts(delta):
            yield from self._say(part)
        if delta.finish:
            yield from self._end(delta)

    def last(self) -> Iterator[bytes]:
        return iter(())

    def _count(self, delta: Delta) -> None:
        usage = self._message.usage
        usage.cache_read_input_tokens = max(usage.cache_read_input_tokens, delta.cached)
        usage.input_tokens = self._prompt - usage.cache_read_input_tokens
        usage.output_tokens += len(delta.tokens)

    def _say(self, part: AnswerPart) -> Iterator[bytes]:
        """A block goes on until a part of another kind comes."""
        if self._writing is None or not self._writing.goes_on(part):
            yield from self._close()
            self._writing = Writing(len(self._message.content), part)
            yield _event(BlockStart(self._writing.index, self._writing.block))
            self._message.content.append(self._writing.block)
        if isinstance(part, Content | Reasoning | Arguments):
            self._writing.text += part.text
            yield _framed(BlockDelta, self._writing.piece(part.text))
        if isinstance(part, CallEnded):
            yield from self._close()

    def _close(self) -> Iterator[bytes]:
        if self._writing is not None:
            self._writing.close()
            yield _event(BlockStop(self._writing.index))
        self._writing = None

    def _end(self, delta: Delta) -> Iterator[bytes]:
        yield from self._close()
        message = self._message
        message.stop_reason = self._reason(delta)
        message.stop_sequence = delta.stop
        self._explanation.end(0, delta)
        message.penstock = self._explanation.told()
        yield _event(MessageDelta(End(message.stop_reason, message.stop_sequence), message.usage, message.penstock))
        yield _event(MessageStop())

    def _reason(self, delta: Delta) -> str:
        if delta.finish == "length":
            return self._at_limit
        if delta.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._turn.calls else "end_turn"


class Writing:
    """A block that is being written."""

    def __init__(self, index: int, part: AnswerPart) -> None:
        self.index = index
        self.block, delta = _opened(part)
        self.piece = Plain(lambda text: BlockDelta(index, delta(text)))
        self.text = ""

    def goes_on(self, part: AnswerPart) -> bool:
        return isinstance(self.block, WRITTEN_IN.get(type(part), ()))

    def close(self) -> None:
        match self.block:
            case TextBlock():
                self.block.text = self.text
            case ThinkingBlock():
                self.block.thinking = self.text
            case ToolUseBlock():
                self.block.input = _input(self.text)


def _input(text: str) -> dict[str, Any]:
    """A call's arguments. Those that cannot be read are told as they are, under the name that Anthropic proposes for
    such: an empty object would be a call that nobody made."""
    given = call_input(text)
    return {"INVALID_JSON": text} if given is None else given


WRITTEN_IN = {Content: TextBlock, Reasoning: ThinkingBlock, Arguments: ToolUseBlock, CallEnded: ToolUseBlock}


def _opened(part: AnswerPart) -> tuple[Block, Callable[[str], TextDelta | ThinkingDelta | InputDelta]]:
    if isinstance(part, CallStarted):
        return ToolUseBlock(part.id, part.name), InputDelta
    return (ThinkingBlock(""), ThinkingDelta) if isinstance(part, Reasoning) else (TextBlock(""), TextDelta)

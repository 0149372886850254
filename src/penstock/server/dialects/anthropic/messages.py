"""Serves POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect.

The answer has the served model's own name, even if a request calls it by another. `max_tokens` is a limit: an answer
that reaches the end of the context first has the stop_reason for that.
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
from penstock.server.chat.answer_turn import AnswerExplanation, AnswerTurn
from penstock.server.chat.chat_turn import (
    TurnOptions,
    begin_turn,
    call_input,
    render_continued,
    render_prompt,
)
from penstock.server.chat.tools import ToolUse
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.anthropic.errors import ANTHROPIC_ERRORS
from penstock.server.dialects.anthropic.fields import (
    NO_EFFECT,
    MessagesBody,
    MessagesConversation,
    read_grammar,
    read_messages,
    template_fields,
)
from penstock.server.dialects.anthropic.tools import read_use
from penstock.server.generation.explain import AnswerReport, Explanation
from penstock.server.generation.speculation_fields import limit_drafts
from penstock.server.http.bodies import read_body
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import EVENT_STREAM, ChunkTemplate, Framing, encode, json_response, reply
from penstock.server.models.served_model import ServedModel
from penstock.text import ChatPrompt, Delta
from penstock.text.parse import AnswerPart, Arguments, CallEnded, CallStarted, Content, Reasoning
from penstock.types import SamplingParams


async def messages(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, MessagesBody, NO_EFFECT)
    context.notes.explain |= bool(body.penstock)
    limit_drafts(served, context, body.speculation)
    sampling, use = _sampling(served, body), read_use(context, body.tools or [], body.tool_choice)
    messages, prompt = await _prompt(served, context, body, use)
    continuing = messages[-1]["role"] == "assistant"
    options = TurnOptions(max_tokens=body.max_tokens, thinking_budget=_budget(body), continuing=continuing)
    turn = begin_turn(served, context, prompt, use, [sampling], options)
    at_limit = "max_tokens" if turn.request.max_tokens == body.max_tokens else "model_context_window_exceeded"
    writer = MessageWriter(served.name, turn, Explanation(served, context, turn.requests), at_limit)
    return await reply(http, context, writer, turn.deltas, streaming=bool(body.stream), framing=ANTHROPIC)


async def count_tokens(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, MessagesConversation, NO_EFFECT)
    _, prompt = await _prompt(served, context, body, read_use(context, body.tools or [], body.tool_choice))
    return json_response({"input_tokens": len(prompt.tokens)})


# -- reading ------------------------------------------------------------------------------------------------------


async def _prompt(
    served: ServedModel, context: RequestContext, body: MessagesConversation, use: ToolUse
) -> tuple[list[dict[str, Any]], ChatPrompt]:
    """Returns the messages as templates take them, and their prompt. An answer that was begun is continued."""
    served.check_model(body.model, context)
    messages, fields = read_messages(context, body), template_fields(served, context, body)
    if messages[-1]["role"] == "assistant":
        return messages, await render_continued(served, messages, use, **fields)
    return messages, await render_prompt(served, messages, use, **fields)


def _sampling(served: ServedModel, body: MessagesBody) -> SamplingParams:
    stops = check_stops(tuple(body.stop_sequences or ()), "stop_sequences")
    given: dict[str, Any] = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    given |= {"grammar": read_grammar(body), "loop_guard": body.loop_guard}
    return served.text.sampling(stop=stops, **given)


def _budget(body: MessagesBody) -> int | None:
    return body.thinking.budget_tokens if body.thinking else None


# -- answering ----------------------------------------------------------------------------------------------------


class AnthropicUsage(msgspec.Struct):
    input_tokens: int  # computed ones: reused ones are counted apart
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # reasoning is accepted back unsigned


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageResponse(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    usage: AnthropicUsage
    role: str = "assistant"
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    penstock: AnswerReport | UnsetType = UNSET


class AnthropicEvent(msgspec.Struct, tag_field="type"):
    """Is an event of a streamed message. Its type is also the event's name."""


class MessageStart(AnthropicEvent, tag="message_start"):
    message: MessageResponse


class Ping(AnthropicEvent, tag="ping"):
    pass


class BlockStart(AnthropicEvent, tag="content_block_start"):
    index: int
    content_block: Block


class AnthropicTextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class AnthropicThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class AnthropicInputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(AnthropicEvent, tag="content_block_delta"):
    index: int
    delta: AnthropicTextDelta | AnthropicThinkingDelta | AnthropicInputDelta


class BlockStop(AnthropicEvent, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(AnthropicEvent, tag="message_delta"):
    delta: StopDelta
    usage: AnthropicUsage
    penstock: AnswerReport | UnsetType = UNSET


class MessageStop(AnthropicEvent, tag="message_stop"):
    pass


EVENTS = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
MESSAGES = Operation(MessagesBody, NO_EFFECT, MessageResponse, EVENTS)
COUNT_TOKENS = Operation(MessagesConversation, NO_EFFECT)


def _event(event: AnthropicEvent) -> bytes:
    return _framed(type(event), encode(event))


def _framed(kind: type[AnthropicEvent], data: bytes) -> bytes:
    return b"event: " + str(kind.__struct_config__.tag).encode() + b"\ndata: " + data + b"\n\n"


def _error(error: PenstockError) -> bytes:
    return b"event: error\ndata: " + ANTHROPIC_ERRORS.encode(error) + b"\n\n"


ANTHROPIC = Framing(EVENT_STREAM, bytes, b"", _error)


class MessageWriter:
    """Writes a message as events; a whole message is made of the same events."""

    def __init__(self, model: str, turn: AnswerTurn, explanation: AnswerExplanation, at_limit: str) -> None:
        """Takes the model's name, and the stop reason of an answer that reaches the limit on its tokens."""
        self._turn = turn
        self._explanation = explanation
        self._message = MessageResponse(
            f"msg_{secrets.token_hex(12)}", model, AnthropicUsage(turn.prompt_tokens, 0, 0, 0)
        )
        self._at_limit = at_limit
        self._begun = False
        self._open: OpenBlock | None = None

    def collect(self, choice: int, delta: Delta) -> None:
        for _ in self.chunks(choice, delta):
            pass

    def result(self) -> MessageResponse:
        return self._message

    def chunks(self, _: int, delta: Delta) -> Iterator[bytes]:
        self._count(delta)
        if not self._begun:
            self._begun = True
            yield _event(MessageStart(self._message))
            yield _event(Ping())
        for part in self._turn.parts(delta):
            yield from self._write(part)
        if delta.finish:
            yield from self._end(delta)

    def final_chunks(self) -> Iterator[bytes]:
        return iter(())

    def _count(self, delta: Delta) -> None:
        usage = self._message.usage
        usage.cache_read_input_tokens = max(usage.cache_read_input_tokens, delta.cached)
        usage.input_tokens = self._turn.prompt_tokens - usage.cache_read_input_tokens
        usage.output_tokens += len(delta.tokens)

    def _write(self, part: AnswerPart) -> Iterator[bytes]:
        """Adds a part to the open block, or to a new one if the part is of another kind."""
        if self._open is None or not self._open.takes(part):
            yield from self._close()
            self._open = OpenBlock(len(self._message.content), part)
            yield _event(BlockStart(self._open.index, self._open.block))
            self._message.content.append(self._open.block)
        if isinstance(part, Content | Reasoning | Arguments):
            self._open.text += part.text
            yield _framed(BlockDelta, self._open.chunk(part.text))
        if isinstance(part, CallEnded):
            yield from self._close()

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open.close()
            yield _event(BlockStop(self._open.index))
        self._open = None

    def _end(self, delta: Delta) -> Iterator[bytes]:
        yield from self._close()
        message = self._message
        message.stop_reason = self._reason(delta)
        message.stop_sequence = delta.stop
        self._explanation.end(0, delta)
        message.penstock = self._explanation.report()
        yield _event(
            MessageDelta(StopDelta(message.stop_reason, message.stop_sequence), message.usage, message.penstock)
        )
        yield _event(MessageStop())

    def _reason(self, delta: Delta) -> str:
        if delta.finish == "length":
            return "max_tokens" if delta.loop else self._at_limit
        if delta.finish == "abort":
            return "pause_turn"
        if delta.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._turn.calls() else "end_turn"


class OpenBlock:
    """Represents a block that is still being written."""

    def __init__(self, index: int, part: AnswerPart) -> None:
        self.index = index
        self.block, delta = _new_block(part)
        self.chunk = ChunkTemplate(lambda text: BlockDelta(index, delta(text)))
        self.text = ""

    def takes(self, part: AnswerPart) -> bool:
        return isinstance(self.block, BLOCK_OF.get(type(part), ()))

    def close(self) -> None:
        match self.block:
            case TextBlock():
                self.block.text = self.text
            case ThinkingBlock():
                self.block.thinking = self.text
            case ToolUseBlock():
                self.block.input = _input(self.text)


def _input(text: str) -> dict[str, Any]:
    """Returns a call's arguments. Invalid JSON is returned as text, under the name that Anthropic proposes for it: an
    empty object would be a call that the model did not make."""
    given = call_input(text)
    return {"INVALID_JSON": text} if given is None else given


BLOCK_OF = {Content: TextBlock, Reasoning: ThinkingBlock, Arguments: ToolUseBlock, CallEnded: ToolUseBlock}


def _new_block(
    part: AnswerPart,
) -> tuple[Block, Callable[[str], AnthropicTextDelta | AnthropicThinkingDelta | AnthropicInputDelta]]:
    match part:
        case CallStarted():
            return ToolUseBlock(part.id, part.name), AnthropicInputDelta
        case Reasoning():
            return ThinkingBlock(""), AnthropicThinkingDelta
    return TextBlock(""), AnthropicTextDelta

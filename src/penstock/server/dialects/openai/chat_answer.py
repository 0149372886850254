"""Defines the objects that answers of POST /v1/chat/completions are made of, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.chat.logprobs import PromptLogprobs, TokenEntry
from penstock.server.generation.explain import AnswerReport
from penstock.server.generation.fields import CompletionHead, CompletionUsage
from penstock.server.generation.timings import Timings
from penstock.text.parse import AnswerPart, Arguments, CallEnded, CallStarted, Content, Reasoning


class ChatLogprobs(msgspec.Struct):
    content: list[TokenEntry]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class VerboseReport(msgspec.Struct):
    prompt: str


class ChatCompletion(CompletionHead, kw_only=True):
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    verbose: VerboseReport | UnsetType = msgspec.field(default=UNSET, name="__verbose")
    penstock: AnswerReport | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | UnsetType | None = UNSET
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET  # in the last
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(CompletionHead, kw_only=True):
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    penstock: AnswerReport | UnsetType = UNSET


def add_part(message: AssistantMessage, part: AnswerPart) -> None:
    match part:
        case Content(text):
            message.content = (message.content or "") + text
        case Reasoning(text):
            message.reasoning = message.reasoning_content = (message.reasoning or "") + text
        case CallStarted(_, id, name):
            message.tool_calls = [*(message.tool_calls or ()), ToolCall(id, CalledFunction(name, ""))]
        case Arguments(index, text):
            assert message.tool_calls
            message.tool_calls[index].function.arguments += text


def chat_delta(part: AnswerPart) -> ChatDelta | None:
    """Returns a part's chunk; None for the end of a call."""
    match part:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case CallStarted(index, id, name):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta("", name), id, "function")])
        case Arguments(index, text):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))])
        case CallEnded():
            return None

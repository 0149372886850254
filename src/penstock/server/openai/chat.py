"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import MAX_MESSAGES, MAX_PARTS, check_count
from penstock.server.bodies import ANYTHING, Neutral, read_object, unsupported
from penstock.server.chat.chat_turn import after_thinking
from penstock.server.chat.stream import deltas, together
from penstock.server.chat.tools import Call as MadeCall
from penstock.server.chat.tools import Tool, held, read_calls, read_tools, told_reasoning
from penstock.server.explain import Explanation, Penstock
from penstock.server.openai.fields import (
    NEUTRAL,
    CompletionTokensDetails,
    Fields,
    Head,
    Tally,
    Usage,
    new_head,
    read_fields,
    sampling,
    told_logprob,
)
from penstock.server.openai.request import request_of, shown_special, taken
from penstock.server.openapi import Operation, read_as
from penstock.server.served_model import Served, off_loop
from penstock.server.sse import Plain, encode, reply
from penstock.text import Delta, Text, Tokenizer
from penstock.text.parse import AnswerParser, AnswerPart, Arguments, CallEnded, CallStarted, Content, Reasoning
from penstock.types import Request, TokenLogprob

CHAT_NEUTRAL: Neutral = NEUTRAL | {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": ANYTHING,  # of what the answer will be: it may make it faster, never another
    "web_search_options": (),
}
MESSAGE_NEUTRAL: Neutral = {"annotations": ([],), "audio": (), "function_call": ()}
PART_NEUTRAL: Neutral = {"prompt_cache_breakpoint": ANYTHING}


class Chat(Fields):
    messages: list[Annotated[dict[str, Any], read_as(Message, neutral=MESSAGE_NEUTRAL)]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Annotated[dict[str, Any], read_as(Tool)]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[dict[str, Any], read_as(TextPart, RefusalPart, neutral=PART_NEUTRAL)]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Annotated[dict[str, Any], read_as(MadeCall)]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["refusal"]
    refusal: str


async def chat_completions(served: Served, http: HttpRequest) -> Response:
    asked = await read_fields(http, Chat, CHAT_NEUTRAL)
    served.check_model(asked.model)
    served.check_answers()
    params = sampling(served, asked, max_tokens=_max_tokens(asked), logprobs=_asked_logprobs(asked))
    messages = read_messages(asked.messages)
    use = read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    text, size = served.text, sum(len(m["content"] or "") for m in messages)
    fields = template_fields(text, asked.reasoning_effort, asked.chat_template_kwargs) | _verbosity(text, asked)
    prompt = await off_loop(size, lambda: text.chat_prompt(messages, tools=use.tools, **fields))
    params = [after_thinking(text, prompt, held(text, use, each)) for each in params]
    tokens = taken(served, asked, prompt.tokens, params[0].max_tokens)
    requests = [request_of(served, asked, tokens, each, "messages") for each in params]
    answer = ChatAnswer(served, requests, asked, lambda: use.parser(text.format, prompt.opened))
    shown = text.special_in(text.format.markers(use.calling)) | shown_special(served, asked)
    running = together([deltas(served, request, choice, shown=shown) for choice, request in enumerate(requests)])
    return await reply(http, answer, running, streaming=bool(asked.stream))


# -- reading ------------------------------------------------------------------------------------------------------


def read_messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: a role and a text each, and what an assistant thought and called."""
    if not given:
        raise InvalidRequest("messages is empty: at least one is needed", param="messages")
    check_count(given, MAX_MESSAGES, "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(given: dict[str, Any], where: str) -> dict[str, Any]:
    message = read_object(given, Message, MESSAGE_NEUTRAL, where)
    role = "system" if message.role == "developer" else message.role
    if message.content is None and message.refusal is not None:
        message.content = message.refusal
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(
            f"the field '{where}.content' is missing", param=f"{where}.content", code="missing_required_parameter"
        )
    content = None if message.content is None else _text(message.content, f"{where}.content")
    reasoning = message.reasoning_content or message.reasoning
    named = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": read_calls(message.tool_calls, f"{where}.tool_calls") if message.tool_calls else None,
    }
    said = {"role": role, "content": content} | {name: value for name, value in named.items() if value is not None}
    return said | told_reasoning(reasoning, content) if reasoning else said


def template_fields(
    text: Text, effort: str | None, kwargs: dict[str, Any] | None, param: str = "reasoning_effort"
) -> dict[str, Any]:
    """What is asked of the template beside messages and tools: refused where it has no word for it. `param` is the
    field the effort came in."""
    fields: dict[str, Any] = {}
    if effort == "none":
        fields = {} if text.format.plain(calling=False) else {"enable_thinking": False}
    elif effort is not None:
        fields = {"reasoning_effort": effort}
    if not all(text.takes(name) for name in fields):
        raise unsupported(param, effort)
    for name, value in (kwargs or {}).items():
        if name in ("messages", "tools", "add_generation_prompt") or not text.takes(name):
            raise unsupported(f"chat_template_kwargs.{name}", value)
        fields[name] = value
    return fields


def _verbosity(text: Text, asked: Chat) -> dict[str, Any]:
    if asked.verbosity in (None, "medium"):
        return {}
    if not text.takes("verbosity"):
        raise unsupported("verbosity", asked.verbosity)
    return {"verbosity": asked.verbosity}


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    check_count(content, MAX_PARTS, where)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: dict[str, Any], where: str) -> str:
    match part.get("type"):
        case "text":
            return read_object(part, TextPart, PART_NEUTRAL, where).text
        case "refusal":
            return read_object(part, RefusalPart, PART_NEUTRAL, where).refusal
        case other:
            raise unsupported(f"{where}.type", other)


def _max_tokens(asked: Chat) -> int | None:
    given = {value for value in (asked.max_tokens, asked.max_completion_tokens) if value is not None}
    if len(given) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens are two names of one limit and differ: send one", param="max_tokens"
        )
    if 0 in given:
        raise InvalidRequest("max_tokens must be at least 1; got 0", param="max_tokens")
    return next(iter(given), None)


def _asked_logprobs(asked: Chat) -> int | None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if asked.top_logprobs is not None and not 0 <= asked.top_logprobs <= 20:
        raise InvalidRequest(f"top_logprobs must be between 0 and 20; got {asked.top_logprobs}", param="top_logprobs")
    return (asked.top_logprobs or 0) if asked.logprobs else None


# -- answering ----------------------------------------------------------------------------------------------------


class Alternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(Alternative):
    top_logprobs: list[Alternative]


class Logprobs(msgspec.Struct):
    content: list[TokenEntry]
    refusal: None = None


class Function(msgspec.Struct):
    name: str
    arguments: str


class Call(msgspec.Struct):
    id: str
    function: Function
    type: str = "function"


class Said(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Choice(msgspec.Struct):
    index: int
    message: Said
    logprobs: Logprobs | None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Completion(Head, kw_only=True):
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    penstock: Penstock | UnsetType = UNSET


class FunctionPiece(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class CallPiece(msgspec.Struct, omit_defaults=True):
    index: int
    function: FunctionPiece
    id: str | None = None
    type: str | None = None


class Added(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPiece] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Added
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Chunk(Head, kw_only=True):
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    penstock: Penstock | UnsetType = UNSET


CHAT_COMPLETIONS = Operation(Chat, CHAT_NEUTRAL, Completion, Chunk)


class ChatAnswer:
    """`new_parser` gives a parser for each choice, or none where answers are content alone."""

    def __init__(
        self,
        served: Served,
        requests: Sequence[Request],
        asked: Chat,
        new_parser: Callable[[], AnswerParser | None] = lambda: None,
    ) -> None:
        self._tokenizer = served.text.tokenizer
        self._head = new_head("chatcmpl", served.name, asked.service_tier)
        self._prompt_ids = requests[0].prompt if asked.return_token_ids else UNSET
        self._tally = Tally(requests, asked.choices)
        self._explanation = Explanation(served, requests)
        self._scored = bool(asked.logprobs)
        self._usage = None if asked.wants_usage else UNSET
        self._choices = [Choice(index, Said(""), self._logprobs([])) for index in range(len(requests))]
        self._plains: dict[int, Plain] = {}  # of choices of which something was streamed
        self._parsers = [new_parser() for _ in requests]
        self._reasoned = 0  # tokens

    def take(self, choice: int, delta: Delta) -> None:
        self._tally.take(choice, delta)
        kept = self._choices[choice]
        for part in self._parts(choice, delta):
            _keep(kept.message, part)
        if delta.finish:
            kept.finish_reason = self._finish(choice, delta)
            self._explanation.end(choice, delta)
        if kept.logprobs is not None:
            kept.logprobs.content += token_entries(self._tokenizer, delta)
        if self._prompt_ids is not UNSET:
            kept.token_ids = [*(kept.token_ids or ()), *delta.tokens]

    def whole(self) -> Completion:
        for choice in self._choices:
            if choice.message.tool_calls and not choice.message.content:
                choice.message.content = None
        told: dict[str, Any] = {"usage": self._told_usage(), "penstock": self._explanation.told()}
        told["prompt_token_ids"] = self._prompt_ids
        return Completion(**self._head, object="chat.completion", choices=self._choices, **told)

    def chunks(self, choice: int, delta: Delta) -> Iterator[bytes]:
        self._tally.take(choice, delta)
        if choice not in self._plains:
            first = self._chunk(ChunkChoice(choice, Added("assistant", "")))
            first.prompt_token_ids = self._prompt_ids
            yield encode(first)
            self._plains[choice] = Plain(lambda text: self._chunk(ChunkChoice(choice, Added(content=text))))
        parts = self._parts(choice, delta)
        if self._scored or self._prompt_ids is not UNSET:
            yield from self._detailed_chunks(choice, delta, parts)
        else:
            for part in parts:
                yield self._plains[choice](part.text) if type(part) is Content else self._part_chunk(choice, part)
        if delta.finish:
            self._explanation.end(choice, delta)
            chunk = self._chunk(ChunkChoice(choice, Added(), finish_reason=self._finish(choice, delta)))
            if self._usage is UNSET:
                chunk.penstock = self._explanation.told()
            yield encode(chunk)

    def _detailed_chunks(self, choice: int, delta: Delta, parts: Sequence[AnswerPart]) -> Iterator[bytes]:
        """A delta's tokens go with the first of its parts: they may be markers, which are in none."""
        entries = token_entries(self._tokenizer, delta) if self._scored else []
        ids = UNSET if self._prompt_ids is UNSET else list(delta.tokens)
        added = [_added(part) for part in parts] or ([Added(content="")] if entries or ids else [])
        for each in added:
            yield encode(self._chunk(ChunkChoice(choice, each, self._logprobs(entries), token_ids=ids)))
            entries, ids = [], ids and []

    def _part_chunk(self, choice: int, part: AnswerPart) -> bytes:
        return encode(self._chunk(ChunkChoice(choice, _added(part))))

    def _parts(self, choice: int, delta: Delta) -> list[AnswerPart]:
        """What a delta adds; that a call has ended is not told."""
        parser = self._parsers[choice]
        if parser is None:
            return [Content(delta.text)] if delta.text else []
        reasoning = parser.reasoning
        parts = parser.push(delta.text) + (parser.finish() if delta.finish else [])
        self._reasoned += len(delta.tokens) if reasoning or parser.reasoning else 0
        return [part for part in parts if type(part) is not CallEnded]

    def _finish(self, choice: int, delta: Delta) -> str | None:
        parser = self._parsers[choice]
        return "tool_calls" if delta.finish == "stop" and parser is not None and parser.calls else delta.finish

    def _told_usage(self) -> Usage:
        usage = self._tally.usage()
        if self._reasoned:
            usage.completion_tokens_details = CompletionTokensDetails(self._reasoned)
        return usage

    def last(self) -> Iterator[bytes]:
        if self._usage is None:
            told: dict[str, Any] = {"usage": self._told_usage(), "penstock": self._explanation.told()}
            yield encode(Chunk(**self._head, object="chat.completion.chunk", choices=[], **told))

    def _chunk(self, choice: ChunkChoice) -> Chunk:
        return Chunk(**self._head, object="chat.completion.chunk", choices=[choice], usage=self._usage)

    def _logprobs(self, entries: list[TokenEntry]) -> Logprobs | None:
        return Logprobs(entries) if self._scored else None


def token_entries(tokenizer: Tokenizer, delta: Delta) -> list[TokenEntry]:
    """Of the tokens that are part of the text."""
    return [_entry(tokenizer, each) for each in delta.logprobs[: len(delta.logprobs) - delta.silent]]


def _entry(tokenizer: Tokenizer, scored: TokenLogprob) -> TokenEntry:
    top = [Alternative(*_spelled(tokenizer, token, logprob)) for token, logprob in scored.top]
    return TokenEntry(*_spelled(tokenizer, scored.token, scored.logprob), top)


def _spelled(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    spelling = tokenizer.token_bytes(token)
    return spelling.decode("utf-8", "replace"), told_logprob(logprob), list(spelling)


def _keep(message: Said, part: AnswerPart) -> None:
    match part:
        case Content(text):
            message.content = (message.content or "") + text
        case Reasoning(text):
            message.reasoning = message.reasoning_content = (message.reasoning or "") + text
        case CallStarted(_, id, name):
            message.tool_calls = [*(message.tool_calls or ()), Call(id, Function(name, ""))]
        case Arguments(index, text):
            assert message.tool_calls
            message.tool_calls[index].function.arguments += text


def _added(part: AnswerPart) -> Added:
    match part:
        case Content(text):
            return Added(content=text)
        case Reasoning(text):
            return Added(reasoning_content=text, reasoning=text)
        case CallStarted(index, id, name):
            return Added(tool_calls=[CallPiece(index, FunctionPiece("", name), id, "function")])
        case Arguments(index, text):
            return Added(tool_calls=[CallPiece(index, FunctionPiece(text))])
    raise AssertionError(part)

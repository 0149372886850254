"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.openai import (
    ANYTHING,
    NEUTRAL,
    Fields,
    Head,
    Neutral,
    Tally,
    Usage,
    new_head,
    read_fields,
    read_object,
    sampling,
    told_logprob,
    unsupported,
)
from penstock.server.reply import Plain, encode, reply
from penstock.server.served import Served, off_loop
from penstock.server.stream import deltas, together
from penstock.text import Delta
from penstock.types import Request, TokenLogprob

CHAT_NEUTRAL: Neutral = NEUTRAL | {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": ANYTHING,
    "prediction": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE_NEUTRAL: Neutral = {"annotations": ([],), "audio": (), "function_call": (), "refusal": (), "tool_calls": ([],)}


class Chat(Fields):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]]
    name: str | None = None
    tool_call_id: str | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


async def chat_completions(served: Served, http: HttpRequest) -> Response:
    asked = await read_fields(http, Chat, CHAT_NEUTRAL)
    served.check_model(asked.model)
    params = sampling(served, asked, max_tokens=_max_tokens(asked), logprobs=_asked_logprobs(asked))
    messages = read_messages(asked.messages)
    prompt = await off_loop(sum(len(m["content"]) for m in messages), lambda: served.text.encode_chat(messages))
    requests = [served.request(prompt, each, "messages") for each in params]
    answer = ChatAnswer(served, requests, asked)
    running = together([deltas(served, request, choice) for choice, request in enumerate(requests)])
    return await reply(http, answer, running, streaming=bool(asked.stream))


# -- reading ------------------------------------------------------------------------------------------------------


def read_messages(given: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Messages as a chat template takes them: a role and a text each."""
    if not given:
        raise InvalidRequest("messages is empty: at least one is needed", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(given: dict[str, Any], where: str) -> dict[str, str]:
    message = read_object(given, Message, MESSAGE_NEUTRAL, where)
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    content = {"role": role, "content": _text(message.content, f"{where}.content")}
    return content | {name: value for name, value in named.items() if value is not None}


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: dict[str, Any], where: str) -> str:
    if part.get("type") != "text":
        raise unsupported(f"{where}.type", part.get("type"))
    return read_object(part, TextPart, {}, where).text


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


class Said(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(msgspec.Struct):
    index: int
    message: Said
    logprobs: Logprobs | None
    finish_reason: str | None = None


class Completion(Head, kw_only=True):
    choices: list[Choice]
    usage: Usage


class Added(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Added
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Chunk(Head, kw_only=True):
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatAnswer:
    def __init__(self, served: Served, requests: Sequence[Request], asked: Chat) -> None:
        self._tokenizer = served.text.tokenizer
        self._head = new_head("chatcmpl", served.name)
        self._tally = Tally(requests, asked.choices)
        self._scored = bool(asked.logprobs)
        self._usage = None if asked.wants_usage else UNSET
        self._choices = [Choice(index, Said(""), self._logprobs([])) for index in range(len(requests))]
        self._plains: dict[int, Plain] = {}  # of choices of which something was streamed

    def take(self, choice: int, delta: Delta) -> None:
        self._tally.take(choice, delta)
        kept = self._choices[choice]
        kept.message.content += delta.text
        kept.finish_reason = delta.finish
        if kept.logprobs is not None:
            kept.logprobs.content += self._entries(delta)

    def whole(self) -> Completion:
        return Completion(**self._head, object="chat.completion", choices=self._choices, usage=self._tally.usage())

    def chunks(self, choice: int, delta: Delta) -> Iterator[bytes]:
        self._tally.take(choice, delta)
        if choice not in self._plains:
            yield encode(self._chunk(ChunkChoice(choice, Added("assistant", ""))))
            self._plains[choice] = Plain(lambda text: self._chunk(ChunkChoice(choice, Added(content=text))))
        if self._scored:
            entries = self._entries(delta)
            if delta.text or entries:
                yield encode(self._chunk(ChunkChoice(choice, Added(content=delta.text), Logprobs(entries))))
        elif delta.text:
            yield self._plains[choice](delta.text)
        if delta.finish:
            yield encode(self._chunk(ChunkChoice(choice, Added(), finish_reason=delta.finish)))

    def last(self) -> Iterator[bytes]:
        if self._usage is None:
            yield encode(Chunk(**self._head, object="chat.completion.chunk", choices=[], usage=self._tally.usage()))

    def _chunk(self, choice: ChunkChoice) -> Chunk:
        return Chunk(**self._head, object="chat.completion.chunk", choices=[choice], usage=self._usage)

    def _logprobs(self, entries: list[TokenEntry]) -> Logprobs | None:
        return Logprobs(entries) if self._scored else None

    def _entries(self, delta: Delta) -> list[TokenEntry]:
        """Of the tokens that are part of the text."""
        return [self._entry(each) for each in delta.logprobs[: len(delta.logprobs) - delta.silent]]

    def _entry(self, scored: TokenLogprob) -> TokenEntry:
        top = [Alternative(*self._spelled(token, logprob)) for token, logprob in scored.top]
        return TokenEntry(*self._spelled(scored.token, scored.logprob), top)

    def _spelled(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        spelling = self._tokenizer.token_bytes(token)
        return spelling.decode("utf-8", "replace"), told_logprob(logprob), list(spelling)

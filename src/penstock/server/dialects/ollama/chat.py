"""Serves POST /api/chat and /api/generate: Ollama's dialect, which streams an answer as lines of JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from time import perf_counter_ns
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.chat.answer_turn import AnswerExplanation, AnswerTurn
from penstock.server.chat.chat_turn import NO_TOOLS, ChatTurn, TurnOptions, begin_turn, call_input, render_prompt
from penstock.server.chat.logprobs import TokenEntry, token_entries
from penstock.server.chat.stream import deltas
from penstock.server.chat.tools import ToolUse, read_tools
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.ollama.derived_settings import settings_of, with_options, with_template
from penstock.server.dialects.ollama.errors import OLLAMA_ERRORS
from penstock.server.dialects.ollama.fields import (
    GENERATE_NO_EFFECT,
    NO_EFFECT,
    OllamaChatBody,
    OllamaFields,
    OllamaGenerateBody,
    check,
    read_options,
    template_fields,
    unloads,
)
from penstock.server.generation.explain import AnswerReport, Explanation
from penstock.server.generation.modelfile import read_messages
from penstock.server.http.bodies import ignore_unsupported, read_body, unsupported
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import ChunkTemplate, Framing, encode, json_response, reply
from penstock.server.models.served_model import ServedModel, off_loop
from penstock.text import Delta
from penstock.text.infill import infill_of, infill_prompt
from penstock.text.parse import AnswerPart, Arguments, CallEnded, CallStarted, Content, Reasoning

OLLAMA = Framing(b"application/x-ndjson", lambda line: line + b"\n", b"", OLLAMA_ERRORS.encode)


async def chat(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, OllamaChatBody, NO_EFFECT)
    check(context, body)
    derived = settings_of(served, context, body.model)
    use = read_tools(context, body.tools)
    if not body.messages:
        return _loaded(chat_line, served, context, body)
    messages = read_messages(context, body.messages)
    turn = await _turn(served, context, with_options(derived, body), messages, use)
    return await _answer(served, http, context, body, turn, chat_line)


async def generate(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, OllamaGenerateBody, GENERATE_NO_EFFECT)
    check(context, body)
    derived = settings_of(served, context, body.model)
    if not body.prompt and not body.suffix:
        return _loaded(generate_line, served, context, body)
    body = with_options(derived, body)
    if body.suffix:
        turn = await _infill_turn(served, context, body)
    elif body.raw or (served.text.template is None and not (body.template or derived.messages)):
        turn = await _raw_turn(served, context, body, "" if body.raw else derived.system)
    else:
        messages: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": body.prompt})
        turn = await _turn(with_template(served, body.template or ""), context, body, messages, NO_TOOLS)
    return await _answer(served, http, context, body, turn, generate_line)


async def _turn(
    served: ServedModel, context: RequestContext, body: OllamaFields, messages: list[dict[str, Any]], use: ToolUse
) -> ChatTurn:
    sampling, max_tokens = read_options(served, context, body)
    prompt = await render_prompt(served, messages, use, **template_fields(served, context, body))
    return begin_turn(served, context, prompt, use, [sampling], TurnOptions(max_tokens=max_tokens))


async def _raw_turn(served: ServedModel, context: RequestContext, body: OllamaGenerateBody, system: str) -> ChatTurn:
    if body.template:
        raise unsupported("template", body.template)
    if body.think:
        ignore_unsupported(context, "think", body.think)
    text = (body.system or system) + (body.prompt or "")
    prompt = await off_loop(len(text), lambda: served.text.encode_prompt(text))
    return _completion_turn(served, context, body, prompt, ())


async def _infill_turn(served: ServedModel, context: RequestContext, body: OllamaGenerateBody) -> ChatTurn:
    """Returns a turn for the text between prompt and suffix. The model's own tokens ask for it, without a template or
    a system prompt."""
    for field in ("template", "system"):
        if getattr(body, field):
            raise InvalidRequest(f"suffix cannot be combined with {field}: leave one of them out", param=field)
    if body.think:
        ignore_unsupported(context, "think", body.think)
    tokenizer, before, after = served.text.tokenizer, body.prompt or "", body.suffix or ""
    infill = infill_of(tokenizer)
    if infill is None:
        raise unsupported("suffix", after)
    prompt = await off_loop(len(before) + len(after), lambda: infill_prompt(tokenizer, infill, before, after))
    return _completion_turn(served, context, body, prompt, infill.ends)


def _completion_turn(
    served: ServedModel, context: RequestContext, body: OllamaGenerateBody, prompt: list[int], ends: tuple[int, ...]
) -> ChatTurn:
    """Returns a turn that continues the prompt; its text has no markers to parse."""
    sampling, max_tokens = read_options(served, context, body)
    request = served.request(context, prompt, replace(sampling, stop_token_ids=ends), "prompt", max_tokens)
    return ChatTurn([request], deltas(served, context, request, continuing=True), [None])


async def _answer(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    body: OllamaFields,
    turn: ChatTurn,
    line: Callable[..., OllamaLine],
) -> Response:
    scored = turn.request.sampling.logprobs is not None
    entries = partial(token_entries, served.text.tokenizer) if scored else None
    writer = OllamaWriter(served.name, turn, Explanation(served, context, turn.requests), line, entries)
    return await reply(http, context, writer, turn.deltas, streaming=body.stream is not False, framing=OLLAMA)


def _loaded(
    line: Callable[..., OllamaLine], served: ServedModel, context: RequestContext, body: OllamaFields
) -> Response:
    """Answers a request that only loads or unloads the model: that happens when the request ends. Wrong options are
    errors all the same."""
    read_options(served, context, body)
    if unloads(body) and context.caller.payer is not None and not context.caller.payer.admin:
        raise context.caller.payer.forbidden("admin", f"unload {served.name!r}: this needs a key made with --admin")
    reason, ignored = "unload" if unloads(body) else "load", sorted(context.notes.ignored)
    answer = line(OllamaAssistantMessage(""), model=served.name, created_at=now(), done=True, done_reason=reason)
    if ignored:
        answer.penstock = AnswerReport(ignored, 0)
    return json_response(answer)


# -- answering ----------------------------------------------------------------------------------------------------


class OllamaLine(msgspec.Struct, kw_only=True):
    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET  # durations are in nanoseconds
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenEntry] | UnsetType = UNSET
    penstock: AnswerReport | UnsetType = UNSET


class OllamaCalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct):
    id: str
    function: OllamaCalledFunction


class OllamaAssistantMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaChatLine(OllamaLine):
    message: OllamaAssistantMessage


class OllamaGenerateLine(OllamaLine):
    response: str
    thinking: str | UnsetType = UNSET


CHAT = Operation(OllamaChatBody, NO_EFFECT, OllamaChatLine, OllamaChatLine)
GENERATE = Operation(OllamaGenerateBody, GENERATE_NO_EFFECT, OllamaGenerateLine, OllamaGenerateLine)


def chat_line(message: OllamaAssistantMessage, **rest: Any) -> OllamaLine:
    return OllamaChatLine(message=message, **rest)


def generate_line(message: OllamaAssistantMessage, **rest: Any) -> OllamaLine:
    return OllamaGenerateLine(response=message.content, thinking=message.thinking, **rest)


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter:
    def __init__(
        self,
        model: str,
        turn: AnswerTurn,
        explanation: AnswerExplanation,
        line: Callable[..., OllamaLine],
        entries: Callable[[Delta], list[TokenEntry]] | None = None,
    ) -> None:
        """Takes the model's name, what makes a line, and what makes logprobs of a delta if they are wanted."""
        self._head = {"model": model, "created_at": now()}
        self._turn = turn
        self._explanation = explanation
        self._line = line
        self._template = ChunkTemplate(lambda text: line(OllamaAssistantMessage(text), **self._head, done=False))
        self._entries_of = entries
        self._began = self._first = perf_counter_ns()
        self._generated = 0
        self._message = OllamaAssistantMessage("")
        self._logprobs: list[TokenEntry] = []
        self._calls: list[tuple[CallStarted, list[str]]] = []  # each call with the pieces of its arguments
        self._reason = ""

    def collect(self, _: int, delta: Delta) -> None:
        self._count(delta)
        message = self._message
        for added in self._messages(delta):
            message.content += added.content
            if added.thinking:
                message.thinking = (message.thinking or "") + added.thinking
            if added.tool_calls:
                message.tool_calls = [*(message.tool_calls or ()), *added.tool_calls]
        self._logprobs += self._entries(delta)

    def result(self) -> OllamaLine:
        return self._last_line(self._message, self._logprobs)

    def chunks(self, _: int, delta: Delta) -> Iterator[bytes]:
        self._count(delta)
        entries = self._entries(delta)
        for added in self._messages(delta) or ([OllamaAssistantMessage("")] if entries else []):
            if entries or added.thinking or added.tool_calls:
                yield encode(self._line(added, **self._head, done=False, logprobs=entries or UNSET))
            else:
                yield self._template(added.content)
            entries = []

    def final_chunks(self) -> Iterator[bytes]:
        yield encode(self._last_line(OllamaAssistantMessage(""), []))

    def _count(self, delta: Delta) -> None:
        if not self._generated:
            self._first = perf_counter_ns()
        self._generated += len(delta.tokens)
        if delta.finish:
            self._reason = delta.finish
            self._explanation.end(0, delta)

    def _messages(self, delta: Delta) -> list[OllamaAssistantMessage]:
        """Returns the messages that a delta adds. A call comes when it is complete: its arguments are an object
        here."""
        return [added for part in self._turn.parts(delta) if (added := self._added(part)) is not None]

    def _added(self, part: AnswerPart) -> OllamaAssistantMessage | None:
        match part:
            case Content(text):
                return OllamaAssistantMessage(text)
            case Reasoning(text):
                return OllamaAssistantMessage("", thinking=text)
            case CallStarted():
                self._calls.append((part, []))
            case Arguments(_, text):
                self._calls[-1][1].append(text)
            case CallEnded():
                return _call_message(*self._calls[-1])
        return None

    def _last_line(self, message: OllamaAssistantMessage, entries: list[TokenEntry]) -> OllamaLine:
        ended = perf_counter_ns()
        return self._line(
            message,
            model=self._head["model"],
            created_at=now(),
            done=True,
            done_reason=self._reason,
            total_duration=ended - self._began,
            load_duration=0,
            prompt_eval_count=self._turn.prompt_tokens,
            prompt_eval_duration=self._first - self._began,
            eval_count=self._generated,
            eval_duration=ended - self._first,
            logprobs=entries or UNSET,
            penstock=self._explanation.report(),
        )

    def _entries(self, delta: Delta) -> list[TokenEntry]:
        return [] if self._entries_of is None else self._entries_of(delta)


def _call_message(call: CallStarted, pieces: list[str]) -> OllamaAssistantMessage:
    """Returns a call. One whose arguments were cut off is returned as text, so that no client acts on it."""
    arguments = call_input("".join(pieces))
    if arguments is None:
        return OllamaAssistantMessage(f"{call.name}({''.join(pieces)}")
    return OllamaAssistantMessage("", tool_calls=[OllamaToolCall(call.id, OllamaCalledFunction(call.name, arguments))])

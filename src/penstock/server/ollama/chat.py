"""POST /api/chat and /api/generate: Ollama's dialect, a line of JSON for every piece of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.bodies import read_body, unsupported
from penstock.server.chat.chat_turn import NO_TOOLS, ChatTurn, begin, call_input, prompt_of
from penstock.server.chat.stream import deltas
from penstock.server.chat.tools import ToolUse, read_tools
from penstock.server.errors import ollama_body
from penstock.server.explain import AnswerReport, Explanation
from penstock.server.ollama.derived_settings import continued, resolve, with_options, with_template
from penstock.server.ollama.fields import (
    GENERATE_NO_EFFECT,
    NO_EFFECT,
    OllamaChatBody,
    OllamaFields,
    OllamaGenerateBody,
    check,
    read_messages,
    read_options,
    template_fields,
    unloads,
)
from penstock.server.openai.chat import TokenAlternative, TokenEntry
from penstock.server.openai.fields import told_logprob
from penstock.server.openapi import Operation
from penstock.server.request_context import notes
from penstock.server.served_model import ServedModel, off_loop
from penstock.server.sse import ChunkTemplate, Framing, encode, reply
from penstock.text import Delta, Tokenizer
from penstock.text.infill import infill_of, infill_prompt
from penstock.text.parse import Arguments, CallBegun, CallEnded, Content, Part, Reasoning

STAYS = "the model stays loaded as long as this server runs"
OLLAMA = Framing(b"application/x-ndjson", lambda line: line + b"\n", b"", ollama_body)


async def chat(served: ServedModel, http: HttpRequest) -> Response:
    body = await read_body(http, OllamaChatBody, NO_EFFECT)
    check(body)
    served, made = resolve(served, body.model)
    use = read_tools(body.tools, None, None)
    if not body.messages:
        return _loaded(chat_line, served, body)
    messages = continued(made, made.system, read_messages(body.messages))
    turn = await _turn(served, with_options(made, body), messages, use)
    return await _answer(served, http, body, turn, chat_line)


async def generate(served: ServedModel, http: HttpRequest) -> Response:
    body = await read_body(http, OllamaGenerateBody, GENERATE_NO_EFFECT)
    check(body)
    served, made = resolve(served, body.model)
    if not body.prompt and not body.suffix:
        return _loaded(generate_line, served, body)
    body = with_options(made, body)
    if body.suffix:
        turn = await _infill_turn(served, body)
    elif body.raw or (served.text.template is None and not (body.template or made.messages)):
        turn = await _raw_turn(served, body, "" if body.raw else made.system)
    else:
        messages = continued(made, body.system or made.system, [{"role": "user", "content": body.prompt}])
        turn = await _turn(with_template(served, body.template or ""), body, messages, NO_TOOLS)
    return await _answer(served, http, body, turn, generate_line)


async def _turn(served: ServedModel, body: OllamaFields, messages: list[dict[str, Any]], use: ToolUse) -> ChatTurn:
    sampling, most = read_options(served, body)
    prompt = await prompt_of(served, messages, use, **template_fields(served, body))
    return begin(served, prompt, use, sampling, most)


async def _raw_turn(served: ServedModel, body: OllamaGenerateBody, system: str) -> ChatTurn:
    for field in ("think", "template"):
        if getattr(body, field):
            raise unsupported(field, getattr(body, field))
    text = (body.system or system) + (body.prompt or "")
    prompt = await off_loop(len(text), lambda: served.text.encode_prompt(text))
    return _continued(served, body, prompt, ())


async def _infill_turn(served: ServedModel, body: OllamaGenerateBody) -> ChatTurn:
    """The text between prompt and suffix: the model's own tokens ask for it, without a template or a system prompt."""
    for field in ("think", "template", "system", "raw"):
        if getattr(body, field):
            raise InvalidRequest(f"suffix: {field} has no place beside it: leave one out", param=field)
    tokenizer, before, after = served.text.tokenizer, body.prompt or "", body.suffix or ""
    infill = infill_of(tokenizer)
    if infill is None:
        raise unsupported("suffix", after)
    prompt = await off_loop(len(before) + len(after), lambda: infill_prompt(tokenizer, infill, before, after))
    return _continued(served, body, prompt, infill.ends)


def _continued(served: ServedModel, body: OllamaGenerateBody, prompt: list[int], ends: tuple[int, ...]) -> ChatTurn:
    sampling, most = read_options(served, body)
    request = served.request(prompt, replace(sampling, stop_token_ids=ends), "prompt", most)
    return ChatTurn(request, deltas(served, request, continuing=True))


async def _answer(
    served: ServedModel, http: HttpRequest, body: OllamaFields, turn: ChatTurn, line: Callable[..., OllamaLine]
) -> Response:
    answer = OllamaWriter(served, turn, line)
    return await reply(http, answer, turn.running, streaming=body.stream is not False, framing=OLLAMA)


def _loaded(line: Callable[..., OllamaLine], served: ServedModel, body: OllamaFields) -> Response:
    """What a client gets that asks for nothing but a model that is loaded, or no longer: as it stays as long as the
    server runs, the second is told so. Wrong options are told of all the same."""
    read_options(served, body)
    reason, ignored = "unload" if unloads(body) else "load", sorted(notes().ignored)
    told = line(OllamaAssistantMessage(""), model=served.name, created_at=now(), done=True, done_reason=reason)
    if ignored or reason == "unload":
        told.penstock = AnswerReport(ignored, 0, kept=STAYS if reason == "unload" else UNSET)
    return Response(encode(told), media_type="application/json")


# -- answering ----------------------------------------------------------------------------------------------------


class OllamaLine(msgspec.Struct, kw_only=True):
    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET  # durations are nanoseconds
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


def chat_line(said: OllamaAssistantMessage, **rest: Any) -> OllamaLine:
    return OllamaChatLine(message=said, **rest)


def generate_line(said: OllamaAssistantMessage, **rest: Any) -> OllamaLine:
    return OllamaGenerateLine(response=said.content, thinking=said.thinking, **rest)


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter:
    def __init__(self, served: ServedModel, turn: ChatTurn, line: Callable[..., OllamaLine]) -> None:
        self._tokenizer = served.text.tokenizer
        self._head = {"model": served.name, "created_at": now()}
        self._turn = turn
        self._explanation = Explanation(served, [turn.request])
        self._line = line
        self._plain = ChunkTemplate(lambda text: line(OllamaAssistantMessage(text), **self._head, done=False))
        self._scored = turn.request.sampling.logprobs is not None
        self._began = self._first = perf_counter_ns()
        self._generated = 0
        self._said = OllamaAssistantMessage("")
        self._logprobs: list[TokenEntry] = []
        self._calls: list[tuple[CallBegun, list[str]]] = []  # with the pieces of their arguments
        self._reason = ""

    def take(self, _: int, delta: Delta) -> None:
        self._count(delta)
        for said in self._pieces(delta):
            self._said.content += said.content
            if said.thinking:
                self._said.thinking = (self._said.thinking or "") + said.thinking
            if said.tool_calls:
                self._said.tool_calls = [*(self._said.tool_calls or ()), *said.tool_calls]
        self._logprobs += self._entries(delta)

    def whole(self) -> OllamaLine:
        return self._end(self._said, self._logprobs)

    def chunks(self, _: int, delta: Delta) -> Iterator[bytes]:
        self._count(delta)
        entries = self._entries(delta)
        for said in self._pieces(delta) or ([OllamaAssistantMessage("")] if entries else []):
            if entries or said.thinking or said.tool_calls:
                yield encode(self._line(said, **self._head, done=False, logprobs=entries or UNSET))
            else:
                yield self._plain(said.content)
            entries = []

    def last(self) -> Iterator[bytes]:
        yield encode(self._end(OllamaAssistantMessage(""), []))

    def _count(self, delta: Delta) -> None:
        if not self._generated:
            self._first = perf_counter_ns()
        self._generated += len(delta.tokens)
        if delta.finish:
            self._reason = delta.finish
            self._explanation.end(0, delta)

    def _pieces(self, delta: Delta) -> list[OllamaAssistantMessage]:
        """What a delta adds. A call is told when it is whole: its arguments are an object here."""
        return [said for part in self._turn.parts(delta) if (said := self._piece(part)) is not None]

    def _piece(self, part: Part) -> OllamaAssistantMessage | None:
        match part:
            case Content(text):
                return OllamaAssistantMessage(text)
            case Reasoning(text):
                return OllamaAssistantMessage("", thinking=text)
            case CallBegun():
                self._calls.append((part, []))
            case Arguments(_, text):
                self._calls[-1][1].append(text)
            case CallEnded():
                return _called(*self._calls[-1])
        return None

    def _end(self, said: OllamaAssistantMessage, entries: list[TokenEntry]) -> OllamaLine:
        ended = perf_counter_ns()
        return self._line(
            said,
            model=self._head["model"],
            created_at=now(),
            done=True,
            done_reason=self._reason,
            total_duration=ended - self._began,
            load_duration=0,
            prompt_eval_count=len(self._turn.request.prompt),
            prompt_eval_duration=self._first - self._began,
            eval_count=self._generated,
            eval_duration=ended - self._first,
            logprobs=entries or UNSET,
            penstock=self._explanation.told(),
        )

    def _entries(self, delta: Delta) -> list[TokenEntry]:
        if not self._scored:
            return []
        told = delta.logprobs[: len(delta.logprobs) - delta.silent]
        return [
            TokenEntry(
                *_spelled(self._tokenizer, each.token, each.logprob),
                [TokenAlternative(*_spelled(self._tokenizer, *pair)) for pair in each.top],
            )
            for each in told
        ]


def _called(call: CallBegun, pieces: list[str]) -> OllamaAssistantMessage:
    """A call whose arguments were cut off is told as text: nobody should act on it."""
    arguments = call_input("".join(pieces))
    if arguments is None:
        return OllamaAssistantMessage(f"{call.name}({''.join(pieces)}")
    return OllamaAssistantMessage("", tool_calls=[OllamaToolCall(call.id, OllamaCalledFunction(call.name, arguments))])


def _spelled(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    spelling = tokenizer.token_bytes(token)
    return spelling.decode("utf-8", "replace"), told_logprob(logprob), list(spelling)

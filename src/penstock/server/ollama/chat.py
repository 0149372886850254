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
from penstock.server.chat.chat_turn import NO_TOOLS, Turn, begin, call_input, prompt_of
from penstock.server.chat.stream import deltas
from penstock.server.chat.tools import ToolUse, read_tools
from penstock.server.errors import ollama_body
from penstock.server.explain import Explanation, Penstock
from penstock.server.ollama.derived_settings import continued, resolve, with_options, with_template
from penstock.server.ollama.fields import (
    GENERATE_NEUTRAL,
    NEUTRAL,
    Chat,
    Generate,
    Generation,
    check,
    read_messages,
    read_options,
    template_fields,
    unloads,
)
from penstock.server.openai.chat import Alternative, TokenEntry
from penstock.server.openai.fields import told_logprob
from penstock.server.openapi import Operation
from penstock.server.request_context import notes
from penstock.server.served_model import Served, off_loop
from penstock.server.sse import Framing, Plain, encode, reply
from penstock.text import Delta, Tokenizer
from penstock.text.infill import infill_of, infill_prompt
from penstock.text.parse import AnswerPart, Arguments, CallEnded, CallStarted, Content, Reasoning

STAYS = "the model stays loaded as long as this server runs"
OLLAMA = Framing(b"application/x-ndjson", lambda line: line + b"\n", b"", ollama_body)


async def chat(served: Served, http: HttpRequest) -> Response:
    asked = await read_body(http, Chat, NEUTRAL)
    check(asked)
    served, made = resolve(served, asked.model)
    use = read_tools(asked.tools, None, None)
    if not asked.messages:
        return _loaded(chat_line, served, asked)
    messages = continued(made, made.system, read_messages(asked.messages))
    turn = await _turn(served, with_options(made, asked), messages, use)
    return await _answer(served, http, asked, turn, chat_line)


async def generate(served: Served, http: HttpRequest) -> Response:
    asked = await read_body(http, Generate, GENERATE_NEUTRAL)
    check(asked)
    served, made = resolve(served, asked.model)
    if not asked.prompt and not asked.suffix:
        return _loaded(generate_line, served, asked)
    asked = with_options(made, asked)
    if asked.suffix:
        turn = await _infill_turn(served, asked)
    elif asked.raw or (served.text.template is None and not (asked.template or made.messages)):
        turn = await _raw_turn(served, asked, "" if asked.raw else made.system)
    else:
        messages = continued(made, asked.system or made.system, [{"role": "user", "content": asked.prompt}])
        turn = await _turn(with_template(served, asked.template or ""), asked, messages, NO_TOOLS)
    return await _answer(served, http, asked, turn, generate_line)


async def _turn(served: Served, asked: Generation, messages: list[dict[str, Any]], use: ToolUse) -> Turn:
    sampling, most = read_options(served, asked)
    prompt = await prompt_of(served, messages, use, **template_fields(served, asked))
    return begin(served, prompt, use, sampling, most)


async def _raw_turn(served: Served, asked: Generate, system: str) -> Turn:
    for field in ("think", "template"):
        if getattr(asked, field):
            raise unsupported(field, getattr(asked, field))
    text = (asked.system or system) + (asked.prompt or "")
    prompt = await off_loop(len(text), lambda: served.text.encode_prompt(text))
    return _continued(served, asked, prompt, ())


async def _infill_turn(served: Served, asked: Generate) -> Turn:
    """The text between prompt and suffix: the model's own tokens ask for it, without a template or a system prompt."""
    for field in ("think", "template", "system", "raw"):
        if getattr(asked, field):
            raise InvalidRequest(f"suffix: {field} has no place beside it: leave one out", param=field)
    tokenizer, before, after = served.text.tokenizer, asked.prompt or "", asked.suffix or ""
    infill = infill_of(tokenizer)
    if infill is None:
        raise unsupported("suffix", after)
    prompt = await off_loop(len(before) + len(after), lambda: infill_prompt(tokenizer, infill, before, after))
    return _continued(served, asked, prompt, infill.ends)


def _continued(served: Served, asked: Generate, prompt: list[int], ends: tuple[int, ...]) -> Turn:
    sampling, most = read_options(served, asked)
    request = served.request(prompt, replace(sampling, stop_token_ids=ends), "prompt", most)
    return Turn(request, deltas(served, request, continuing=True))


async def _answer(
    served: Served, http: HttpRequest, asked: Generation, turn: Turn, line: Callable[..., Line]
) -> Response:
    answer = LineAnswer(served, turn, line)
    return await reply(http, answer, turn.running, streaming=asked.stream is not False, framing=OLLAMA)


def _loaded(line: Callable[..., Line], served: Served, asked: Generation) -> Response:
    """What a client gets that asks for nothing but a model that is loaded, or no longer: as it stays as long as the
    server runs, the second is told so. Wrong options are told of all the same."""
    read_options(served, asked)
    reason, ignored = "unload" if unloads(asked) else "load", sorted(notes().ignored)
    told = line(Said(""), model=served.name, created_at=now(), done=True, done_reason=reason)
    if ignored or reason == "unload":
        told.penstock = Penstock(ignored, 0, kept=STAYS if reason == "unload" else UNSET)
    return Response(encode(told), media_type="application/json")


# -- answering ----------------------------------------------------------------------------------------------------


class Line(msgspec.Struct, kw_only=True):
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
    penstock: Penstock | UnsetType = UNSET


class Called(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class Call(msgspec.Struct):
    id: str
    function: Called


class Said(msgspec.Struct):
    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatLine(Line):
    message: Said


class GenerateLine(Line):
    response: str
    thinking: str | UnsetType = UNSET


CHAT = Operation(Chat, NEUTRAL, ChatLine, ChatLine)
GENERATE = Operation(Generate, GENERATE_NEUTRAL, GenerateLine, GenerateLine)


def chat_line(said: Said, **rest: Any) -> Line:
    return ChatLine(message=said, **rest)


def generate_line(said: Said, **rest: Any) -> Line:
    return GenerateLine(response=said.content, thinking=said.thinking, **rest)


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class LineAnswer:
    def __init__(self, served: Served, turn: Turn, line: Callable[..., Line]) -> None:
        self._tokenizer = served.text.tokenizer
        self._head = {"model": served.name, "created_at": now()}
        self._turn = turn
        self._explanation = Explanation(served, [turn.request])
        self._line = line
        self._plain = Plain(lambda text: line(Said(text), **self._head, done=False))
        self._scored = turn.request.sampling.logprobs is not None
        self._began = self._first = perf_counter_ns()
        self._generated = 0
        self._said = Said("")
        self._logprobs: list[TokenEntry] = []
        self._calls: list[tuple[CallStarted, list[str]]] = []  # with the pieces of their arguments
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

    def whole(self) -> Line:
        return self._end(self._said, self._logprobs)

    def chunks(self, _: int, delta: Delta) -> Iterator[bytes]:
        self._count(delta)
        entries = self._entries(delta)
        for said in self._pieces(delta) or ([Said("")] if entries else []):
            if entries or said.thinking or said.tool_calls:
                yield encode(self._line(said, **self._head, done=False, logprobs=entries or UNSET))
            else:
                yield self._plain(said.content)
            entries = []

    def last(self) -> Iterator[bytes]:
        yield encode(self._end(Said(""), []))

    def _count(self, delta: Delta) -> None:
        if not self._generated:
            self._first = perf_counter_ns()
        self._generated += len(delta.tokens)
        if delta.finish:
            self._reason = delta.finish
            self._explanation.end(0, delta)

    def _pieces(self, delta: Delta) -> list[Said]:
        """What a delta adds. A call is told when it is whole: its arguments are an object here."""
        return [said for part in self._turn.parts(delta) if (said := self._piece(part)) is not None]

    def _piece(self, part: AnswerPart) -> Said | None:
        match part:
            case Content(text):
                return Said(text)
            case Reasoning(text):
                return Said("", thinking=text)
            case CallStarted():
                self._calls.append((part, []))
            case Arguments(_, text):
                self._calls[-1][1].append(text)
            case CallEnded():
                return _called(*self._calls[-1])
        return None

    def _end(self, said: Said, entries: list[TokenEntry]) -> Line:
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
                [Alternative(*_spelled(self._tokenizer, *pair)) for pair in each.top],
            )
            for each in told
        ]


def _called(call: CallStarted, pieces: list[str]) -> Said:
    """A call whose arguments were cut off is told as text: nobody should act on it."""
    arguments = call_input("".join(pieces))
    if arguments is None:
        return Said(f"{call.name}({''.join(pieces)}")
    return Said("", tool_calls=[Call(call.id, Called(call.name, arguments))])


def _spelled(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    spelling = tokenizer.token_bytes(token)
    return spelling.decode("utf-8", "replace"), told_logprob(logprob), list(spelling)

"""Reads a stream of OpenAI's server-sent events as bytes: it cuts them into whole events, and parses only those that
end the stream or carry its usage. It keeps all bytes, so that another engine can continue the stream."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from penstock.fleet.foreign.http import EngineLost

DONE = b"data: [DONE]"
NOTABLE = re.compile(
    rb'"usage":\s*\{|"finish_reason":\s*"|"error":\s*[{"]|data: \[DONE\]|"response\.(?:completed|incomplete|failed)"'
)
FINISHED = re.compile(rb'"finish_reason":\s*"(\w+)"|"type":\s*"response\.(completed|incomplete|failed)"')
REASONS = {b"length": "length", b"incomplete": "length", b"failed": "error"}
USAGE = re.compile(rb'"usage":\s*\{')
MOST_KEPT = 8 * 2**20  # bytes of a stream that are kept for another engine to continue


class TokenUse(NamedTuple):
    """Says how many tokens an answer took. `cached` is None if the engine does not tell."""

    prompt: int
    generated: int
    cached: int | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Reads usage with the field names of chats, completions and responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _PromptDetails | None = None


class _Timings(msgspec.Struct):
    cache_n: int | None = None


class _Counted(msgspec.Struct):
    usage: _Usage | None = None
    timings: _Timings | None = None
    response: _Counted | None = None  # in the last event of a response


_counted = msgspec.json.Decoder(_Counted)


def usage_in(body: bytes) -> TokenUse | None:
    """Returns the usage that an answer or an event carries; None if it carries none."""
    try:
        read = _counted.decode(body)
        read = read.response or read
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if read.usage is None:
        return None
    usage, timings = read.usage, read.timings
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else None
    if cached is None and timings is not None:
        cached = timings.cache_n  # llama.cpp's older versions tell it there
    return TokenUse(usage.prompt_tokens or usage.input_tokens, usage.completion_tokens or usage.output_tokens, cached)


def finish_in(data: bytes) -> str:
    """Returns the finish reason in an event or an answer: stop, length or error; empty if there is none."""
    found = FINISHED.search(data)
    return REASONS.get(found[1] or found[2], "stop") if found else ""


class Said(NamedTuple):
    """Is the beginning of an answer that another engine is to continue."""

    text: str
    tokens: int


class SoFar(NamedTuple):
    """The content of a stream before it broke off."""

    text: str
    tokens: int  # about: events that had text
    reasoning: bool  # there was reasoning
    calls: bool  # there were tool calls
    choices: int  # choices with content


class EventStream:
    """Follows one stream. `wants_usage`: the client asked for the event that carries the usage."""

    def __init__(self, wants_usage: bool, keep: bool) -> None:
        self.use: TokenUse | None = None
        self.finished = False  # a finish reason has come, or the end
        self.finish = ""  # the reason
        self.events = 0
        self._wants_usage = wants_usage
        self._rest = b""
        self._kept: list[bytes] | None = [] if keep else None
        self._size = 0

    def push(self, data: bytes) -> bytes:
        """Returns the events that are whole now and are for the client. Raises EngineLost at an event that reports an
        error."""
        data = self._rest + data if self._rest else data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return b""
        whole, self._rest = (data, b"") if end == len(data) else (data[:end], data[end:])
        self.events += whole.count(b"\n\n")
        if NOTABLE.search(whole):
            whole = b"".join(self._notable(event) for event in whole.split(b"\n\n") if event)
        if self._kept is not None:
            self._kept.append(whole)
            self._size += len(whole)
            if self._size > MOST_KEPT:
                self._kept = None
        return whole

    def end(self) -> None:
        if not self.finished:
            raise EngineLost("the engine ended the stream without a finish reason")

    def _notable(self, event: bytes) -> bytes:
        if event.startswith(DONE):
            self.finished = True
            return b""  # the relay sends it, after what it has to say
        data = event.partition(b"data:")[2].strip()
        if USAGE.search(event) and (use := usage_in(data)) is not None:
            self.use = use
            if not self._wants_usage and b'"choices"' in data and _has_no_choice(data):
                return b""
        if reason := finish_in(event):
            self.finished, self.finish = True, reason
        if message := error_in(data):
            raise EngineLost(f"the engine reported an error: {message}")
        return event + b"\n\n"

    @property
    def kept(self) -> bool:
        return self._kept is not None

    def so_far(self) -> SoFar:
        text, tokens, reasoning, calls, choices = [], 0, False, False, set()
        for event in b"".join(self._kept or ()).split(b"\n\n"):
            for choice in _choices(event.partition(b"data:")[2].strip()):
                delta = choice.get("delta") or {}
                piece = choice.get("text") or delta.get("content")
                reasoning |= bool(delta.get("reasoning_content") or delta.get("reasoning"))
                calls |= bool(delta.get("tool_calls"))
                if piece:
                    text.append(piece)
                    tokens += 1
                    choices.add(choice.get("index", 0))
        return SoFar("".join(text), tokens, reasoning, calls, len(choices))

    def head(self) -> dict[str, Any]:
        for event in b"".join(self._kept or ()).split(b"\n\n"):
            if (read := _object(event.partition(b"data:")[2].strip())) and "id" in read:
                return {name: read.get(name) for name in ("id", "object", "created", "model")}
        return {}


def error_in(data: bytes) -> str:
    """Returns the message of an event or body that reports an error; empty if it does not."""
    error = (_object(data) or {}).get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error) if error else ""


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        read = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return read if isinstance(read, dict) else None


def _choices(data: bytes) -> list[dict[str, Any]]:
    choices = (_object(data) or {}).get("choices")
    return [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []


def _has_no_choice(data: bytes) -> bool:
    return not _choices(data)


class Continuation:
    """Fits the events of an engine that continues a stream to the first engine's events: the same id, no second role,
    and no repeated beginning."""

    def __init__(self, head: dict[str, Any], said: str, resumed_on: list[str]) -> None:
        self._head = head
        self._said = said  # what the engine may repeat; empty once that is past
        self._resumed_on = resumed_on
        self._begun = False
        self._swap: tuple[bytes, bytes] | None = None

    def fit(self, whole: bytes) -> bytes:
        """Returns events as the client is to see them. Once the beginning is past only the id is exchanged."""
        if self._swap is not None and self._begun and not self._said:
            return whole.replace(*self._swap)
        return b"".join(self._event(event) for event in whole.split(b"\n\n") if event)

    def _event(self, event: bytes) -> bytes:
        read = _object(event.partition(b"data:")[2].strip())
        if read is None:
            return event + b"\n\n"
        if self._swap is None and isinstance(id := read.get("id"), str):
            self._swap = _quoted(id), _quoted(self._head.get("id") or id)
        choices = [each for each in read.get("choices") or () if self._fits(each)]
        if not choices and read.get("choices"):
            return b""
        read |= {name: value for name, value in self._head.items() if value is not None} | {"choices": choices}
        if not self._begun and self._resumed_on:
            read["penstock"] = {"resumed_on": self._resumed_on}
        self._begun = True
        return b"data: " + msgspec.json.encode(read) + b"\n\n"

    def _fits(self, choice: dict[str, Any]) -> bool:
        """Removes the role and what repeats the beginning; returns whether anything is left."""
        delta = choice.get("delta")
        if isinstance(delta, dict):
            delta.pop("role", None)
        holder, name = (delta, "content") if isinstance(delta, dict) else (choice, "text")
        piece = holder.get(name) or ""
        if self._said and piece:
            if self._said.startswith(piece):
                self._said, holder[name] = self._said[len(piece) :], ""
            else:
                holder[name] = piece.removeprefix(self._said)
                self._said = ""
        left = {key: value for key, value in holder.items() if value not in ("", None)}
        return bool(left.keys() - {"index", "finish_reason", "logprobs"}) or choice.get("finish_reason") is not None


def _quoted(text: str) -> bytes:
    return msgspec.json.encode(text)

"""Reads a chat completion's events as the parts of an answer, of which every dialect makes its own chunks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from penstock.fleet.foreign.relay import RelayedStream
from penstock.server.chat.schema_check import TakeDelta
from penstock.text import Delta
from penstock.text.parse import AnswerPart, Arguments, CallEnded, CallStarted, Content, Reasoning


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Added(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Added | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # vLLM's: the stop string that ended the answer


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_chunks = msgspec.json.Decoder(_Chunk)


class RelayedDelta(Delta):
    """Carries the parts that an event adds: another engine has parsed them, and their tokens are not known."""

    parts: Sequence[AnswerPart] = ()


class RelayedTurn:
    """Is a turn of one choice that another engine computes."""

    def __init__(self, stream: RelayedStream) -> None:
        self._stream = stream
        self._calls: list[int] = []  # indices of the calls that have begun
        self._finish = ""
        self._stop: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Returns the prompt's tokens; 0 until the usage comes at the end."""
        return 0 if self._stream.use is None else self._stream.use.prompt

    def parts(self, delta: Delta, choice: int = 0) -> list[AnswerPart]:
        return list(delta.parts) if isinstance(delta, RelayedDelta) else []

    def calls(self, choice: int = 0) -> int:
        return len(self._calls)

    async def deltas(self, take: TakeDelta) -> None:
        """Calls `take` with the answer as it comes. The last delta has the usage and the finish reason."""
        told = 0
        async with aclosing(self._stream.events()) as all_events:
            async for whole in all_events:
                if parts := self._read(whole):
                    told += 1  # about a token; the last delta has the rest
                    take(0, _delta(parts))
        use = self._stream.use
        rest = 0 if use is None else max(use.generated - told, 0)
        cached = 0 if use is None else use.cached or 0
        last = RelayedDelta("", (0,) * rest, cached=cached, finish=self._finish or "stop", stop=self._stop)
        last.parts = [CallEnded(self._calls[-1])] if self._calls else []
        take(0, last)

    def _read(self, whole: bytes) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in whole.split(b"\n\n"):
            data = event.partition(b"data:")[2].strip()
            if not data:
                continue
            try:
                choices = _chunks.decode(data).choices
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            for choice in choices:
                parts += self._choice(choice)
        return parts

    def _choice(self, choice: _Choice) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        added = choice.delta or _Added(content=choice.text)
        if reasoning := added.reasoning_content or added.reasoning:
            parts.append(Reasoning(reasoning))
        if added.content:
            parts.append(Content(added.content))
        for call in added.tool_calls or ():
            parts += self._call(call)
        if choice.finish_reason:
            self._finish = "length" if choice.finish_reason == "length" else "stop"
            self._stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        return parts

    def _call(self, call: _ToolCall) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        function = call.function or _Function()
        if call.index not in self._calls:
            if self._calls:
                parts.append(CallEnded(self._calls[-1]))
            self._calls.append(call.index)
            parts.append(CallStarted(call.index, call.id or f"call_{secrets.token_hex(12)}", function.name or ""))
        if function.arguments:
            parts.append(Arguments(call.index, function.arguments))
        return parts


def _delta(parts: Sequence[AnswerPart]) -> RelayedDelta:
    delta = RelayedDelta("", (0,))
    delta.parts = parts
    return delta

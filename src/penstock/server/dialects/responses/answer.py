"""Writes a response: deltas become items, and events about them. A whole response is made of the same events."""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec
from msgspec import UNSET

from penstock.errors import PenstockError
from penstock.server.chat.chat_turn import ChatTurn, call_input
from penstock.server.chat.logprobs import TokenEntry, token_entries
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.responses.events import (
    LIFECYCLE,
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReadingFailed,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
    framed,
)
from penstock.server.dialects.responses.input import seal
from penstock.server.dialects.responses.items import (
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    LocalShellItem,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    ShellAction,
    new_id,
)
from penstock.server.dialects.responses.tools import CalledTool, ResponseTools
from penstock.server.generation.explain import Explanation
from penstock.server.http.errors import status_of
from penstock.server.http.sse import EVENT_STREAM, Framing
from penstock.server.models.served_model import ServedModel
from penstock.text import Delta
from penstock.text.grammar.call_grammar import INPUT
from penstock.text.parse import AnswerPart, Arguments, CallEnded, CallStarted, Content, Reasoning

Ending = Literal["completed", "incomplete"]


class ResponseWriter:
    """Writes the answer of `turn` into `response`. If `sealed`, reasoning is also in `encrypted_content`."""

    on_end: Callable[[], None] | None = None  # called when the response is complete, before the last event is sent

    def __init__(
        self,
        served: ServedModel,
        context: RequestContext,
        response: ResponseObject,
        turn: ChatTurn,
        tools: ResponseTools,
        *,
        sealed: bool = False,
    ) -> None:
        self.response = response
        self.deltas = turn.deltas
        self._explanation = Explanation(served, context, turn.requests)
        self.framing = Framing(
            EVENT_STREAM, bytes, b"", lambda error: b"".join(map(framed, self.fail(error))), self._lost
        )
        self._turn = turn
        self._tools = tools
        self._tokenizer = served.text.tokenizer
        self._sealed = sealed
        self._sent = 0  # events
        self._begun = False
        self._open_item: OpenItem | None = None
        self._scores: list[TokenEntry] = []  # tokens with incomplete text

    # -- as an AnswerWriter ----------------------------------------------------------------------------------------

    def collect(self, choice: int, delta: Delta) -> None:
        for _ in self.events(delta):
            pass

    def result(self) -> ResponseObject:
        return self.response

    def chunks(self, _: int, delta: Delta) -> Iterator[bytes]:
        return map(framed, self.events(delta))

    def final_chunks(self) -> Iterator[bytes]:
        return iter(())

    # -- events ---------------------------------------------------------------------------------------------------

    def queue(self) -> Iterator[ResponseEvent]:
        return self._numbered([LIFECYCLE["created"](self.response), LIFECYCLE["queued"](self.response)])

    def events(self, delta: Delta) -> Iterator[ResponseEvent]:
        return self._numbered(self._events(delta))

    def fail(self, error: PenstockError) -> Iterator[ResponseEvent]:
        code = "server_error" if status_of(error) >= 500 else "invalid_prompt"
        self.response.error = ResponseError(code, error.message)
        return self._numbered(self._end("failed"))

    def cancel(self) -> Iterator[ResponseEvent]:
        return self._numbered(self._end("cancelled"))

    def _lost(self, error: PenstockError) -> bytes:
        return framed(ReadingFailed(sequence_number=self._sent, code=error.code, message=error.message))

    def _numbered(self, events: Iterable[ResponseEvent]) -> Iterator[ResponseEvent]:
        for event in events:
            event.sequence_number = self._sent
            self._sent += 1
            yield event

    def _events(self, delta: Delta) -> Iterator[ResponseEvent]:
        if not self._begun:
            yield from self._begin()
        for part in self._parts(delta):
            yield from self._write(part)
        if delta.finish == "length":
            self.response.incomplete_details = IncompleteDetails()
        if delta.finish == "abort":
            self.response.incomplete_details = IncompleteDetails("abort")
        if delta.finish:
            self._explanation.end(0, delta)
            self.response.penstock = self._explanation.report()
            yield from self._end("completed" if delta.finish == "stop" else "incomplete")

    def _begin(self) -> Iterator[ResponseEvent]:
        self._begun = True
        if not self._sent:
            yield LIFECYCLE["created"](self.response)
        self.response.status = "in_progress"
        yield LIFECYCLE["in_progress"](self.response)

    def _parts(self, delta: Delta) -> list[AnswerPart]:
        parts = self._turn.parts(delta)
        self._count(delta)
        self._scores += token_entries(self._tokenizer, delta)
        return parts

    def _count(self, delta: Delta) -> None:
        prompt = len(self._turn.request.prompt)
        usage = self.response.usage or ResponseUsage(prompt, InputTokensDetails(), 0, OutputTokensDetails(), prompt)
        usage.input_tokens_details.cached_tokens = max(usage.input_tokens_details.cached_tokens, delta.cached)
        usage.output_tokens += len(delta.tokens)
        usage.output_tokens_details.reasoning_tokens = self._turn.reasoning_tokens
        usage.total_tokens = prompt + usage.output_tokens
        self.response.usage = usage

    def _write(self, part: AnswerPart) -> Iterator[ResponseEvent]:
        """Adds a part to the open item, or to a new one if the part is of another kind."""
        if not isinstance(part, Content):
            self._scores.clear()  # only text has logprobs
        if self._open_item is None or not isinstance(part, self._open_item.parts):
            yield from self._close("completed")
            yield from self._open(part)
        assert self._open_item is not None
        if isinstance(part, Content | Reasoning | Arguments):
            scores, self._scores = self._scores, []
            yield from self._open_item.add(part.text, scores)
        if isinstance(part, CallEnded):
            yield from self._close("completed")

    def _open(self, part: AnswerPart) -> Iterator[ResponseEvent]:
        index = len(self.response.output)
        match part:
            case CallStarted(_, id, name):
                tool = self._tools.of_call(name)
                self._open_item = OPEN_CALLS[tool.kind](index, id, tool)
            case Reasoning():
                self._open_item = OpenReasoning(index, self._sealed)
            case _:
                self._open_item = OpenMessage(index)
        self.response.output.append(self._open_item.item)
        yield from self._open_item.open()

    def _close(self, status: Ending) -> Iterator[ResponseEvent]:
        if self._open_item is not None:
            yield from self._open_item.close(status)
        self._open_item = None

    def _end(self, status: str) -> Iterator[ResponseEvent]:
        """Closes the response. A completed answer without text is an empty message."""
        response = self.response
        if not response.output and status == "completed":
            yield from self._open(Content(""))
        if self._scores and isinstance(self._open_item, OpenMessage):
            yield from self._open_item.add("", self._scores)
        yield from self._close("completed" if status == "completed" else "incomplete")
        response.status = status
        response.completed_at = int(time.time()) if status == "completed" else None
        if self.on_end is not None:
            self.on_end()
        yield LIFECYCLE[status](response)


class OpenItem(ABC):
    """Represents an item that is still being written."""

    item: Item
    parts: tuple[type[AnswerPart], ...]  # parts of such an item

    def __init__(self, index: int) -> None:
        self._index = index
        self._pieces: list[str] = []

    def add(self, text: str, scores: list[TokenEntry]) -> Iterator[ResponseEvent]:
        self._pieces.append(text)
        return self._added(text, scores)

    def open(self) -> Iterator[ResponseEvent]:
        yield ItemAdded(self._index, self.item)
        yield from self._begin()

    def close(self, status: Ending) -> Iterator[ResponseEvent]:
        yield from self._finish("".join(self._pieces))
        self.item.status = status
        yield ItemDone(self._index, self.item)

    @abstractmethod
    def _begin(self) -> Iterator[ResponseEvent]: ...

    @abstractmethod
    def _added(self, text: str, scores: list[TokenEntry]) -> Iterator[ResponseEvent]: ...

    @abstractmethod
    def _finish(self, text: str) -> Iterator[ResponseEvent]: ...


class OpenMessage(OpenItem):
    parts = (Content,)

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.item = self._message = MessageItem(new_id("msg"), "assistant", [], "in_progress")
        self._part = OutputText("")
        self._logprobs: list[TokenEntry] = []

    def _begin(self) -> Iterator[ResponseEvent]:
        self._message.content.append(self._part)
        yield PartAdded(self.item.id, self._index, 0, self._part)

    def _added(self, text: str, scores: list[TokenEntry]) -> Iterator[ResponseEvent]:
        self._logprobs += scores
        yield OutputTextDelta(self.item.id, self._index, 0, text, scores)

    def _finish(self, text: str) -> Iterator[ResponseEvent]:
        self._part.text, self._part.logprobs = text, self._logprobs
        yield OutputTextDone(self.item.id, self._index, 0, text, self._logprobs)
        yield PartDone(self.item.id, self._index, 0, self._part)


class OpenReasoning(OpenItem):
    parts = (Reasoning,)

    def __init__(self, index: int, sealed: bool) -> None:
        super().__init__(index)
        self.item = self._reasoning = ReasoningItem(new_id("rs"), content=[], status="in_progress")
        self._part = ReasoningText("")
        self._sealed = sealed

    def _begin(self) -> Iterator[ResponseEvent]:
        self._reasoning.content = [self._part]
        yield PartAdded(self.item.id, self._index, 0, self._part)

    def _added(self, text: str, _: list[TokenEntry]) -> Iterator[ResponseEvent]:
        yield ReasoningDelta(self.item.id, self._index, 0, text)

    def _finish(self, text: str) -> Iterator[ResponseEvent]:
        self._part.text = text
        self._reasoning.encrypted_content = seal(text) if self._sealed else None
        yield ReasoningDone(self.item.id, self._index, 0, text)
        yield PartDone(self.item.id, self._index, 0, self._part)


class OpenToolCall(OpenItem):
    parts = (Arguments, CallEnded)

    def close(self, status: Ending) -> Iterator[ResponseEvent]:
        """Closes the call, as incomplete if its arguments were cut off: the parser ends a call where the text ends."""
        arguments = "".join(self._pieces)
        complete = arguments and call_input(arguments) is not None
        return super().close(status if complete else "incomplete")


class OpenCall(OpenToolCall):
    def __init__(self, index: int, call_id: str, tool: CalledTool) -> None:
        super().__init__(index)
        self.item = self._call = FunctionCallItem(
            new_id("fc"), call_id, tool.name, "", "in_progress", tool.namespace or UNSET
        )

    def _begin(self) -> Iterator[ResponseEvent]:
        return iter(())

    def _added(self, text: str, _: list[TokenEntry]) -> Iterator[ResponseEvent]:
        yield ArgumentsDelta(self.item.id, self._index, text)

    def _finish(self, text: str) -> Iterator[ResponseEvent]:
        self._call.arguments = text
        yield ArgumentsDone(self.item.id, self._index, text)


class OpenCustomCall(OpenToolCall):
    """Writes a call whose input is text: the one argument of the function that the model knows."""

    def __init__(self, index: int, call_id: str, tool: CalledTool) -> None:
        super().__init__(index)
        self.item = self._call = CustomCallItem(
            new_id("ctc"), call_id, tool.name, "", "in_progress", tool.namespace or UNSET
        )

    def _begin(self) -> Iterator[ResponseEvent]:
        return iter(())

    def _added(self, text: str, _: list[TokenEntry]) -> Iterator[ResponseEvent]:
        return iter(())

    def _finish(self, text: str) -> Iterator[ResponseEvent]:
        given = call_input(text)
        written = _begun_input(text) if given is None else given.get(INPUT)
        self._call.input = written if isinstance(written, str) else text
        yield CustomInputDelta(self.item.id, self._index, self._call.input)
        yield CustomInputDone(self.item.id, self._index, self._call.input)


def _begun_input(arguments: str) -> str | None:
    """Returns the input of a call, as far as it was written before it was cut off; None if the arguments are others."""
    if found := _BEGUN_INPUT.match(arguments):
        return str(json.loads(f'"{found[1]}"', strict=False))
    return "" if f'{{"{INPUT}":"'.startswith("".join(arguments.split())) else None


_BEGUN_INPUT = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"((?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}))*)')


class OpenShellCall(OpenToolCall):
    """Writes a call of the client's shell, which lacks events of its own."""

    def __init__(self, index: int, call_id: str, _: CalledTool) -> None:
        super().__init__(index)
        self.item = self._call = LocalShellItem(new_id("lsh"), call_id, ShellAction([]), "in_progress")

    def _begin(self) -> Iterator[ResponseEvent]:
        return iter(())

    def _added(self, text: str, _: list[TokenEntry]) -> Iterator[ResponseEvent]:
        return iter(())

    def _finish(self, text: str) -> Iterator[ResponseEvent]:
        try:
            self._call.action = msgspec.convert(call_input(text) or {}, ShellAction)
        except msgspec.ValidationError:
            self._call.action = ShellAction([text])  # the client's shell reports errors in it
        return iter(())


OPEN_CALLS: dict[str, type[OpenCall | OpenCustomCall | OpenShellCall]] = {
    "function": OpenCall,
    "custom": OpenCustomCall,
    "local_shell": OpenShellCall,
}

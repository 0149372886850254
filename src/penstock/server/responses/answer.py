"""A response as its text comes: deltas become items, and the events that tell of them. Whole or streamed, the same
events make it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from penstock.errors import PenstockError
from penstock.server.chat.chat_turn import Turn, call_input
from penstock.server.errors import status_of
from penstock.server.explain import Explanation
from penstock.server.openai.chat import TokenEntry, token_entries
from penstock.server.responses.events import (
    LAST,
    ArgumentsDelta,
    ArgumentsDone,
    Created,
    Event,
    InProgress,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    Queued,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
    framed,
)
from penstock.server.responses.input import seal
from penstock.server.responses.items import (
    FunctionCall,
    Incomplete,
    InputDetails,
    Item,
    Message,
    OutputDetails,
    OutputText,
    Reasoning,
    ReasoningText,
    Response,
    Trouble,
    Usage,
    new_id,
)
from penstock.server.served_model import Served
from penstock.server.sse import EVENT_STREAM, Framing
from penstock.text import Delta
from penstock.text.parse import AnswerPart, Arguments, CallEnded, CallStarted, Content
from penstock.text.parse import Reasoning as Thought

Ending = Literal["completed", "incomplete"]


class ResponseAnswer:
    """`sealed`: reasoning is told in `encrypted_content`, too."""

    ended: Callable[[], None] | None = None  # is called when the response is as it will stay, before anyone is told

    def __init__(self, served: Served, response: Response, turn: Turn, *, sealed: bool = False) -> None:
        self.response = response
        self._explanation = Explanation(served, [turn.request])
        self.running = turn.running
        self.framing = Framing(EVENT_STREAM, bytes, b"", lambda error: b"".join(map(framed, self.fail(error))))
        self._turn = turn
        self._tokenizer = served.text.tokenizer
        self._sealed = sealed
        self._told = 0  # events
        self._begun = False
        self._writing: Writing | None = None
        self._scores: list[TokenEntry] = []  # of tokens whose text has not come yet

    # -- as endpoints take it --------------------------------------------------------------------------------------

    def take(self, choice: int, delta: Delta) -> None:
        for _ in self.events(delta):
            pass

    def whole(self) -> Response:
        return self.response

    def chunks(self, _: int, delta: Delta) -> Iterator[bytes]:
        return map(framed, self.events(delta))

    def last(self) -> Iterator[bytes]:
        return iter(())

    # -- events ---------------------------------------------------------------------------------------------------

    def queue(self) -> Iterator[Event]:
        """What is told of a response that waits to be worked on."""
        return self._numbered([Created(self.response), Queued(self.response)])

    def events(self, delta: Delta) -> Iterator[Event]:
        return self._numbered(self._events(delta))

    def fail(self, error: PenstockError) -> Iterator[Event]:
        code = "server_error" if status_of(error) >= 500 else "invalid_prompt"
        self.response.error = Trouble(code, error.message)
        return self._numbered(self._end("failed"))

    def cancel(self) -> Iterator[Event]:
        return self._numbered(self._end("cancelled"))

    def _numbered(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            event.sequence_number = self._told
            self._told += 1
            yield event

    def _events(self, delta: Delta) -> Iterator[Event]:
        if not self._begun:
            yield from self._begin()
        for part in self._parts(delta):
            yield from self._say(part)
        if delta.finish == "length":
            self.response.incomplete_details = Incomplete()
        if delta.finish:
            self._explanation.end(0, delta)
            self.response.penstock = self._explanation.told()
            yield from self._end("incomplete" if delta.finish == "length" else "completed")

    def _begin(self) -> Iterator[Event]:
        self._begun = True
        if not self._told:
            yield Created(self.response)
        self.response.status = "in_progress"
        yield InProgress(self.response)

    def _parts(self, delta: Delta) -> list[AnswerPart]:
        parser = self._turn.parser
        reasoning = parser is not None and parser.reasoning
        parts = self._turn.parts(delta)
        reasoning = reasoning or (parser is not None and parser.reasoning)
        self._count(delta, len(delta.tokens) if reasoning else 0)
        self._scores += token_entries(self._tokenizer, delta)
        return parts

    def _count(self, delta: Delta, reasoned: int) -> None:
        prompt = len(self._turn.request.prompt)
        usage = self.response.usage or Usage(prompt, InputDetails(), 0, OutputDetails(), prompt)
        usage.input_tokens_details.cached_tokens = max(usage.input_tokens_details.cached_tokens, delta.cached)
        usage.output_tokens += len(delta.tokens)
        usage.output_tokens_details.reasoning_tokens += reasoned
        usage.total_tokens = prompt + usage.output_tokens
        self.response.usage = usage

    def _say(self, part: AnswerPart) -> Iterator[Event]:
        """An item goes on until a part of another kind comes."""
        if not isinstance(part, Content):
            self._scores.clear()  # only what is said has a place for them
        if self._writing is None or not isinstance(part, self._writing.parts):
            yield from self._close("completed")
            yield from self._open(part)
        assert self._writing is not None
        if isinstance(part, Content | Thought | Arguments):
            scores, self._scores = self._scores, []
            yield self._writing.add(part.text, scores)
        if isinstance(part, CallEnded):
            yield from self._close("completed")

    def _open(self, part: AnswerPart) -> Iterator[Event]:
        index = len(self.response.output)
        match part:
            case CallStarted(_, id, name):
                self._writing = Calling(index, id, name)
            case Thought():
                self._writing = Thinking(index, self._sealed)
            case _:
                self._writing = Saying(index)
        self.response.output.append(self._writing.item)
        yield from self._writing.open()

    def _close(self, status: Ending) -> Iterator[Event]:
        if self._writing is not None:
            yield from self._writing.close(status)
        self._writing = None

    def _end(self, status: str) -> Iterator[Event]:
        """An answer without a word is a message without text."""
        response = self.response
        if not response.output and status == "completed":
            yield from self._open(Content(""))
        if self._scores and isinstance(self._writing, Saying):
            yield self._writing.add("", self._scores)
        yield from self._close("completed" if status == "completed" else "incomplete")
        response.status = status
        response.completed_at = int(time.time()) if status == "completed" else None
        if self.ended is not None:
            self.ended()
        yield LAST[status](response)


class Writing(ABC):
    """An item that is being written."""

    item: Item
    parts: tuple[type[AnswerPart], ...]  # what it goes on with

    def __init__(self, index: int) -> None:
        self._index = index
        self._pieces: list[str] = []

    def add(self, text: str, scores: list[TokenEntry]) -> Event:
        self._pieces.append(text)
        return self._added(text, scores)

    def open(self) -> Iterator[Event]:
        yield ItemAdded(self._index, self.item)
        yield from self._begin()

    def close(self, status: Ending) -> Iterator[Event]:
        yield from self._finish("".join(self._pieces))
        self.item.status = status
        yield ItemDone(self._index, self.item)

    @abstractmethod
    def _begin(self) -> Iterator[Event]: ...

    @abstractmethod
    def _added(self, text: str, scores: list[TokenEntry]) -> Event: ...

    @abstractmethod
    def _finish(self, text: str) -> Iterator[Event]: ...


class Saying(Writing):
    parts = (Content,)

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.item = self._message = Message(new_id("msg"), "assistant", [], "in_progress")
        self._part = OutputText("")
        self._logprobs: list[TokenEntry] = []

    def _begin(self) -> Iterator[Event]:
        self._message.content.append(self._part)
        yield PartAdded(self.item.id, self._index, 0, self._part)

    def _added(self, text: str, scores: list[TokenEntry]) -> Event:
        self._logprobs += scores
        return TextDelta(self.item.id, self._index, 0, text, scores)

    def _finish(self, text: str) -> Iterator[Event]:
        self._part.text, self._part.logprobs = text, self._logprobs
        yield TextDone(self.item.id, self._index, 0, text, self._logprobs)
        yield PartDone(self.item.id, self._index, 0, self._part)


class Thinking(Writing):
    parts = (Thought,)

    def __init__(self, index: int, sealed: bool) -> None:
        super().__init__(index)
        self.item = self._reasoning = Reasoning(new_id("rs"), content=[], status="in_progress")
        self._part = ReasoningText("")
        self._sealed = sealed

    def _begin(self) -> Iterator[Event]:
        self._reasoning.content = [self._part]
        yield PartAdded(self.item.id, self._index, 0, self._part)

    def _added(self, text: str, _: list[TokenEntry]) -> Event:
        return ReasoningDelta(self.item.id, self._index, 0, text)

    def _finish(self, text: str) -> Iterator[Event]:
        self._part.text = text
        self._reasoning.encrypted_content = seal(text) if self._sealed else None
        yield ReasoningDone(self.item.id, self._index, 0, text)
        yield PartDone(self.item.id, self._index, 0, self._part)


class Calling(Writing):
    parts = (Arguments, CallEnded)

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self.item = self._call = FunctionCall(new_id("fc"), call_id, name, "", "in_progress")

    def close(self, status: Ending) -> Iterator[Event]:
        """The parser ends a call where the text ends: what is no object by then was cut off."""
        arguments = "".join(self._pieces)
        whole = arguments and call_input(arguments) is not None
        return super().close(status if whole else "incomplete")

    def _begin(self) -> Iterator[Event]:
        return iter(())

    def _added(self, text: str, _: list[TokenEntry]) -> Event:
        return ArgumentsDelta(self.item.id, self._index, text)

    def _finish(self, text: str) -> Iterator[Event]:
        self._call.arguments = text
        yield ArgumentsDone(self.item.id, self._index, text)

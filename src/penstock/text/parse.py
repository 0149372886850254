"""An answer's text, as it comes, to what it holds: content, reasoning and tool calls.

What begins like a call and is none is content. A call has begun when its name is known and its arguments open: from
there on they are passed on as they come. Where they stop being well formed the call ends, and the rest is content.
White space next to a marker belongs to the marker.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.text.arguments import json_string, json_value, noted_value, parameters
from penstock.text.streaming_reader import Incoming, Wait
from penstock.text.tool_formats import Calls, Format


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegun(NamedTuple):
    index: int  # type: ignore[assignment]  # calls are numbered: tuple.index is not missed
    id: str
    name: str


class Arguments(NamedTuple):
    """A piece of a call's arguments: together they are a JSON text."""

    index: int  # type: ignore[assignment]
    text: str


class CallEnded(NamedTuple):
    index: int  # type: ignore[assignment]


Part = Content | Reasoning | CallBegun | Arguments | CallEnded
Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of each function, by name


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


class AnswerParser:
    """However the text is cut into pieces, the parts come to the same when joined. `tools` are the functions that may
    be called; none: calls are not looked for. `opened`: the text begins within reasoning."""

    def __init__(
        self,
        format: Format,
        tools: Schemas | None = None,
        *,
        opened: bool = False,
        parallel: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self.calls = 0  # begun
        self.reasoning = opened  # whether what comes next belongs to reasoning, as far as is known
        self._format = format
        self._tools = tools or {}
        self._opened = opened
        self._parallel = parallel
        self._new_id = new_id or (_short_id if format.family.short_ids else _long_id)
        self._source = Incoming()
        self._parts: list[Part] = []
        self._reading = self._read()

    def push(self, text: str) -> list[Part]:
        self._source.push(text)
        next(self._reading, None)
        return self._said()

    def finish(self) -> list[Part]:
        self._source.ended = True
        next(self._reading, None)
        return self._said()

    def _said(self) -> list[Part]:
        parts, self._parts = list(_joined(self._parts)), []
        return parts

    def _content(self, text: str) -> None:
        self._parts.append(Content(text))

    def _reason(self, text: str) -> None:
        self._parts.append(Reasoning(text))

    # -- the parts of an answer -----------------------------------------------------------------------------------

    def _read(self) -> Wait[None]:
        try:
            if self._format.family.channels:
                yield from self._channels()
            else:
                yield from self._reasoning()
                yield from self._answer()
        except _OneCallIsEnough:
            return

    def _reasoning(self) -> Wait[None]:
        if self._format.reasoning is None:
            return
        opening, closing = self._format.reasoning
        if not self._opened and (yield from self._source.match(f" {opening}")) is None:
            return
        self.reasoning = True
        yield from self._source.space()
        if not (yield from self._source.until((closing,), self._reason, spaced=True)):
            self._reason(self._source.rest())
        yield from self._source.match(f" {closing}")
        self.reasoning = False
        yield from self._source.space()

    def _answer(self) -> Wait[None]:
        shapes = self._format.family.calls if self._tools else ()
        openings = tuple({opening: None for shape in shapes for opening in shape.openings})
        for shape in shapes:
            if shape.bare and (yield from self._section(shape)):
                break
        while opening := (yield from self._source.until(openings, self._content, spaced=bool(openings))):
            for shape in shapes:
                if opening in shape.openings and (yield from self._section(shape)):
                    break
            else:
                self._content((yield from self._source.space()) + self._source.take(len(opening)))
        rest = self._source.rest()
        if not self.calls:
            self._content(rest)

    def _section(self, shape: Calls) -> Wait[bool]:
        """Calls that stand together; nothing is taken where there are none."""
        source, (opening, closing) = self._source, shape.section
        source.hold()
        yield from source.space()
        within = (yield from source.match(opening)) is not None
        if not ((within or (shape.head and not shape.bare)) and (yield from self._call(shape))):
            source.back()
            return False
        while not closing or not within or (yield from source.match(f" {closing}")) is None:
            source.hold()
            if (yield from source.match(f" {shape.separator} ")) is None or not (yield from self._call(shape)):
                source.back()
                break
        return True

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call(self, shape: Calls) -> Wait[bool]:
        """Whether a call began here. What was read before it did may still be gone back to."""
        source = self._source
        yield from source.space()
        if not shape.head:
            return (yield from self._object(shape.bare))
        fields = yield from source.match(shape.head)
        if fields is None:
            return False
        name, id = _named(fields)
        if shape.parameter is not None:
            if not (yield from source.next_in(shape.parameter[0], shape.tail)):
                return False
            self._begin(name, id)
            yield from parameters(source, shape, self._tools.get(name, {}), self._argue)
        elif not (yield from self._open_braced(shape, name, id)):
            return False
        self._end()
        return True

    def _open_braced(self, shape: Calls, name: str, id: str | None) -> Wait[bool]:
        yield from self._source.space()
        if not (yield from self._source.next_is("{")):
            return False
        self._begin(name, id)
        if shape.quote:
            whole = yield from noted_value(self._source, shape.quote, self._argue)
        else:
            whole = yield from json_value(self._source, self._argue)
        if whole:
            yield from self._source.match(f" {shape.tail}")
        return True

    def _object(self, bare: bool) -> Wait[bool]:
        """A call as one JSON object. Its arguments are held back as long as its name has not come; with no marker
        around it, only a function that exists makes it a call."""
        name, held = "", ""
        separator = "{"
        while key := (yield from self._key(separator)):
            separator = " ,"
            if key == "name":
                name = yield from self._quoted()
                if not name or (bare and name not in self._tools):
                    return False
            elif key not in _ARGUMENTS:
                if not (yield from json_value(self._source, _ignore)):
                    return False
            elif not (yield from self._source.next_is("{")):
                return False
            elif name:
                self._begin(name)
                if (yield from json_value(self._source, self._argue)):
                    yield from self._rest_of_object()
                self._end()
                return True
            else:
                written: list[str] = []
                if not (yield from json_value(self._source, written.append)):
                    return False
                held = "".join(written)
            if name and held:
                break
            if name and (yield from self._source.next_in("}")):
                held = "{}"
                break
        if not (name and held):
            return False
        self._begin(name)
        self._argue(held)
        yield from self._rest_of_object()
        self._end()
        return True

    def _rest_of_object(self) -> Wait[None]:
        """Takes what stands after the arguments, if it is well formed."""
        self._source.hold()
        while (yield from self._key(" ,")):
            if not (yield from json_value(self._source, _ignore)):
                break
        if (yield from self._source.match(" }")) is None:
            self._source.back()
        else:
            self._source.release()

    def _key(self, separator: str) -> Wait[str]:
        """The key of the next member that a call may have; none where there is no such."""
        if (yield from self._source.match(f"{separator} ")) is None:
            return ""
        key = yield from self._quoted()
        if key not in (*_ARGUMENTS, "name", "id", "type") or (yield from self._source.match(" : ")) is None:
            return ""
        return key

    def _quoted(self) -> Wait[str]:
        written: list[str] = []
        if not (yield from self._source.next_is('"')) or not (yield from json_string(self._source, written.append)):
            return ""
        text: str = json.loads("".join(written))
        return text

    def _begin(self, name: str, id: str | None = None) -> None:
        if self.calls and not self._parallel:
            raise _OneCallIsEnough
        self._source.commit()
        self._parts.append(CallBegun(self.calls, id or self._new_id(), name))
        self.calls += 1

    def _argue(self, text: str) -> None:
        self._parts.append(Arguments(self.calls - 1, text))

    def _end(self) -> None:
        self._parts.append(CallEnded(self.calls - 1))

    # -- channels -------------------------------------------------------------------------------------------------

    def _channels(self) -> Wait[None]:
        """Parts with headers. What has no header that can be read is content."""
        source = self._source
        while (yield from source.peek()):
            source.hold()
            header = yield from self._header()
            if header is None:
                source.back()
                yield from self._body(self._content)
            elif header[1].startswith("functions.") and self._tools:
                yield from self._channel_call(header[1].removeprefix("functions."))
            else:
                source.commit()
                self.reasoning = header[0] == "analysis"
                yield from self._body(self._reason if self.reasoning else self._content)
                self.reasoning = False

    def _header(self) -> Wait[tuple[str, str] | None]:
        """A part's channel and to whom it goes."""
        match = self._source.match
        yield from match("<|start|>")
        yield from match("assistant")
        to = yield from match(" to={id}")
        channel = yield from match(" <|channel|>{word}")
        if channel is None:
            return None
        to = (yield from match(" to={id}")) or to or {"id": ""}
        yield from match(" <|constrain|>")
        yield from match(" {word}")
        return None if (yield from match(" <|message|>")) is None else (channel["word"], to["id"])

    def _channel_call(self, name: str) -> Wait[None]:
        if (yield from self._open_braced(self._format.family.calls[0], name, None)):
            self._end()
        else:
            self._source.back()
            yield from self._body(self._content)

    def _body(self, say: Callable[[str], None]) -> Wait[None]:
        end = yield from self._source.until(_BODY_ENDS, say)
        self._source.take(len(end))


class _OneCallIsEnough(Exception):
    """The rest of the answer is not wanted."""


_ARGUMENTS = ("arguments", "parameters")
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_LETTERS = string.ascii_letters + string.digits


def _ignore(_: str) -> None: ...


def _short_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _named(fields: Mapping[str, str]) -> tuple[str, str | None]:
    """A call's name and id; an id may have the name within: functions.name:0."""
    id = fields.get("id")
    name = fields.get("name") or (id or "").removeprefix("functions.").rsplit(":", 1)[0]
    return name, id


def _joined(parts: Sequence[Part]) -> Iterator[Part]:
    """Neighbours that are pieces of one text as one; empty ones left out."""
    last: Part | None = None
    for part in parts:
        if isinstance(part, Content | Reasoning | Arguments):
            if not part.text:
                continue
            if last is not None and type(part) is type(last):
                last = last._replace(text=last.text + part.text)
                continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last

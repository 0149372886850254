"""Splits the text of a streamed answer into content, reasoning and tool calls.

Text that only begins like a call is content. A call starts once its name is known and its arguments begin; from then on
arguments are streamed. If they become malformed, the call ends and the rest is content. White space next to a marker
belongs to the marker. A call that repeats an earlier one ends the answer and is left out, so calls are held back until
they differ. A call that is cut off before its arguments is left out.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.text.arguments import gemma_value, json_string, json_value, parameters
from penstock.text.streaming_reader import Reading, StreamingReader
from penstock.text.tool_formats import AnswerFormat, CallSyntax


class Content(NamedTuple):
    """Carries a piece of the answer's content."""

    text: str


class Reasoning(NamedTuple):
    """Carries a piece of the model's reasoning."""

    text: str


class CallStarted(NamedTuple):
    """Marks the start of a tool call."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    id: str
    name: str


class Arguments(NamedTuple):
    """Carries a piece of a call's arguments. Concatenated, the pieces are a JSON text."""

    index: int  # type: ignore[assignment]
    text: str


class CallEnded(NamedTuple):
    """Marks the end of a tool call."""

    index: int  # type: ignore[assignment]


AnswerPart = Content | Reasoning | CallStarted | Arguments | CallEnded
Schemas = Mapping[str, Mapping[str, Any]]  # function name -> JSON schema of its parameters


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


class AnswerParser:
    """Parses an answer independently of how its text is split. `tools` are the available functions; without any, calls
    are not parsed. `opened`: the text begins within reasoning. `forced`: the answer consists of calls, so a cut-off
    call is not content.
    """

    def __init__(
        self,
        format: AnswerFormat,
        tools: Schemas | None = None,
        *,
        opened: bool = False,
        parallel: bool = True,
        forced: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self.calls = 0  # number of started calls
        self.ended = False  # later text is ignored
        self.reasoning = opened  # whether the next text is reasoning, as far as known
        self._format = format
        self._tools = tools or {}
        self._opened = opened
        self._parallel = parallel
        self._forced = forced
        self._repeats = _Repeats()
        self._new_id = new_id or (_short_id if format.tool_format.short_ids else _long_id)
        self._source = StreamingReader()
        self._parts: list[AnswerPart] = []
        self._reading = self._read()

    def push(self, text: str) -> list[AnswerPart]:
        self._source.push(text)
        next(self._reading, None)
        return self._take_parts()

    def finish(self) -> list[AnswerPart]:
        self._source.ended = True
        next(self._reading, None)
        return self._take_parts()

    def _take_parts(self) -> list[AnswerPart]:
        parts, self._parts = list(_joined(self._parts)), []
        return parts

    def _emit_content(self, text: str) -> None:
        self._parts.append(Content(text))

    def _emit_reasoning(self, text: str) -> None:
        self._parts.append(Reasoning(text))

    # ---- parts of an answer ----

    def _read(self) -> Reading[None]:
        try:
            if self._format.tool_format.channels:
                yield from self._channels()
            else:
                yield from self._reasoning()
                yield from self._source.match(self._format.tool_format.content[0])
                yield from self._answer()
        except _LastCall:
            self.ended = True

    def _reasoning(self) -> Reading[None]:
        if self._format.reasoning is None:
            return
        opening, closing = self._format.reasoning
        if not self._opened and (yield from self._source.match(f" {opening}")) is None:
            return
        self.reasoning = True
        yield from self._source.space()
        if not (yield from self._source.until((closing,), self._emit_reasoning, spaced=True)):
            self._emit_reasoning(self._source.rest())
        yield from self._source.match(f" {closing}")
        self.reasoning = False
        yield from self._source.space()

    def _answer(self) -> Reading[None]:
        syntaxes = self._format.tool_format.calls if self._tools else ()
        openings = tuple({opening: None for syntax in syntaxes for opening in syntax.openings})
        for syntax in syntaxes:
            if syntax.bare and (yield from self._section(syntax)):
                break
        closing = self._format.tool_format.content[1]
        ends = (*openings, closing) if closing else openings
        while opening := (yield from self._source.until(ends, self._emit_content, spaced=bool(openings))):
            if opening == closing:
                raise _LastCall
            for syntax in syntaxes:
                if opening in syntax.openings and (yield from self._section(syntax)):
                    break
            else:
                self._emit_content((yield from self._source.space()) + self._source.take(len(opening)))
        rest = self._source.rest()
        if not self.calls:
            self._emit_content(rest)

    def _section(self, syntax: CallSyntax) -> Reading[bool]:
        """Reads consecutive calls and returns True if there were any; otherwise it consumes nothing."""
        source, (opening, closing) = self._source, syntax.section
        source.cut = False
        source.mark()
        yield from source.space()
        within = (yield from source.match(opening)) is not None
        marked = bool((within and opening) or (syntax.head and not syntax.bare))
        if not ((within or (syntax.head and not syntax.bare)) and (yield from self._call(syntax))):
            self._check_cut(marked)
            source.rewind()
            return False
        while not closing or not within or (yield from source.match(f" {closing}")) is None:
            source.mark()
            if (yield from source.match(f" {syntax.separator} ")) is None or not (yield from self._call(syntax)):
                self._check_cut(marked)
                source.rewind()
                break
        return True

    def _check_cut(self, marked: bool) -> None:
        """Ends the answer if the end of the text cut off a call that was marked, forced, or preceded by another."""
        if self._source.cut and (marked or self._forced or self.calls):
            raise _LastCall

    # ---- calls ----

    def _call(self, syntax: CallSyntax) -> Reading[bool]:
        """Reads a call and returns True if one started. Until then, the caller may rewind."""
        source = self._source
        yield from source.space()
        if not syntax.head:
            return (yield from self._object(syntax.bare))
        fields = yield from source.match(syntax.head)
        if fields is None:
            return False
        name, id = _name_and_id(fields)
        if syntax.parameter is not None:
            if not (yield from source.next_in(syntax.parameter[0], syntax.tail)):
                return False
            self._begin(name, id)
            yield from parameters(source, syntax, self._tools.get(name, {}), self._emit_arguments)
        elif not (yield from self._open_braced(syntax, name, id)):
            return False
        self._end()
        return True

    def _open_braced(self, syntax: CallSyntax, name: str, id: str | None) -> Reading[bool]:
        yield from self._source.space()
        if not (yield from self._source.next_is("{")):
            return False
        self._begin(name, id)
        if syntax.quote:
            whole = yield from gemma_value(self._source, syntax.quote, self._emit_arguments)
        else:
            whole = yield from json_value(self._source, self._emit_arguments)
        if whole:
            yield from self._source.match(f" {syntax.tail}")
        return True

    def _object(self, bare: bool) -> Reading[bool]:
        """Reads a call written as one JSON object. Arguments are held back until the name is known. Without a marker,
        it is a call only if the function exists.
        """
        name, pending = "", ""
        separator = "{"
        while key := (yield from self._key(separator)):
            separator = " ,"
            if key == "name":
                name = yield from self._quoted()
                if not name or (bare and name not in self._tools):
                    return False
            elif key not in _ARGUMENTS:
                if not (yield from json_value(self._source, _drop)):
                    return False
            elif not (yield from self._source.next_is("{")):
                return False
            elif name:
                self._begin(name)
                if (yield from json_value(self._source, self._emit_arguments)):
                    yield from self._rest_of_object()
                self._end()
                return True
            else:
                written: list[str] = []
                if not (yield from json_value(self._source, written.append)):
                    return False
                pending = "".join(written)
            if name and pending:
                break
            if name and (yield from self._source.next_in("}")):
                pending = "{}"
                break
        if not (name and pending):
            return False
        self._begin(name)
        self._emit_arguments(pending)
        yield from self._rest_of_object()
        self._end()
        return True

    def _rest_of_object(self) -> Reading[None]:
        self._source.mark()
        while (yield from self._key(" ,")):
            if not (yield from json_value(self._source, _drop)):
                break
        if (yield from self._source.match(" }")) is None:
            self._source.rewind()
        else:
            self._source.release()

    def _key(self, separator: str) -> Reading[str]:
        """Reads the next member's key; "" if a call cannot have such a member."""
        if (yield from self._source.match(f"{separator} ")) is None:
            return ""
        key = yield from self._quoted()
        if key not in (*_ARGUMENTS, "name", "id", "type") or (yield from self._source.match(" : ")) is None:
            return ""
        return key

    def _quoted(self) -> Reading[str]:
        written: list[str] = []
        if not (yield from self._source.next_is('"')) or not (yield from json_string(self._source, written.append)):
            return ""
        text: str = json.loads("".join(written))
        return text

    def _begin(self, name: str, id: str | None = None) -> None:
        if self.calls and not self._parallel:
            raise _LastCall
        self._source.commit()
        self._add_parts(self._repeats.begin(CallStarted(self.calls, id or self._new_id(), name)))

    def _emit_arguments(self, text: str) -> None:
        self._add_parts(self._repeats.add(text))

    def _end(self) -> None:
        self._add_parts(self._repeats.end())

    def _add_parts(self, parts: Sequence[AnswerPart]) -> None:
        self.calls += sum(type(part) is CallStarted for part in parts)
        self._parts += parts

    # ---- channels ----

    def _channels(self) -> Reading[None]:
        """Reads parts with headers. A part without a readable header is content."""
        source = self._source
        while (yield from source.peek()):
            source.mark()
            header = yield from self._header()
            if header is None:
                source.rewind()
                yield from self._body(self._emit_content)
            elif header[1].startswith("functions.") and self._tools:
                yield from self._channel_call(header[1].removeprefix("functions."))
            else:
                source.commit()
                self.reasoning = header[0] == "analysis"
                yield from self._body(self._emit_reasoning if self.reasoning else self._emit_content)
                self.reasoning = False

    def _header(self) -> Reading[tuple[str, str] | None]:
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

    def _channel_call(self, name: str) -> Reading[None]:
        if (yield from self._open_braced(self._format.tool_format.calls[0], name, None)):
            self._end()
        else:
            self._source.rewind()
            yield from self._body(self._emit_content)

    def _body(self, emit: Callable[[str], None]) -> Reading[None]:
        end = yield from self._source.until(_BODY_ENDS, emit)
        self._source.take(len(end))


class _LastCall(Exception):
    """Ends parsing: the content ended, or a call was not allowed, repeated or cut off."""


class _Repeats:
    """Holds back a call while it is the beginning of an earlier one with the same name."""

    def __init__(self) -> None:
        self._earlier: list[tuple[str, str]] = []  # names and arguments
        self._started: CallStarted | None = None
        self._written = ""
        self._held = False

    def begin(self, started: CallStarted) -> list[AnswerPart]:
        self._started, self._written = started, ""
        self._held = self._repeats()
        return [] if self._held else [started]

    def add(self, text: str) -> list[AnswerPart]:
        assert self._started is not None
        self._written += text
        index = self._started.index
        if not self._held:
            return [Arguments(index, text)]
        self._held = self._repeats()
        return [] if self._held else [self._started, Arguments(index, self._written)]

    def end(self) -> list[AnswerPart]:
        """Returns the end of the call; raises if the call repeats an earlier one."""
        assert self._started is not None
        if self._held:
            raise _LastCall
        self._earlier.append((self._started.name, self._written))
        return [CallEnded(self._started.index)]

    def _repeats(self) -> bool:
        assert self._started is not None
        name, written = self._started.name, self._written
        return any(each == name and arguments.startswith(written) for each, arguments in self._earlier)


_ARGUMENTS = ("arguments", "parameters")
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_LETTERS = string.ascii_letters + string.digits


def _drop(_: str) -> None: ...


def _short_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _name_and_id(fields: Mapping[str, str]) -> tuple[str, str | None]:
    """Returns the name and id of a call. The name may be part of the id: functions.name:0."""
    id = fields.get("id")
    name = fields.get("name") or (id or "").removeprefix("functions.").rsplit(":", 1)[0]
    return name, id


def _joined(parts: Sequence[AnswerPart]) -> Iterator[AnswerPart]:
    """Joins adjacent pieces of the same kind and drops empty ones."""
    last: AnswerPart | None = None
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

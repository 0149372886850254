"""What an answer whose calls are held to their schemas may be, as a Lark grammar for llguidance: the same data as the
parser's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.text.families import Calls, Family, pieces
from penstock.text.parse import Schemas

ANYTHING = r"/(.|\n)*/"
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def call_grammar(
    family: Family,
    tools: Schemas,
    special: Mapping[str, int],
    *,
    parallel: bool = True,
    prose: bool = False,
    content: Mapping[str, Any] | None = None,
) -> str:
    """One call of one of the tools or, in parallel, several; with `prose`, after any text that begins none, or no call
    at all; with `content`, a schema, either calls or what matches that. `special` are the model's special tokens by
    their text: they are not spelled but named by id. What a model thinks before it calls is not part of it, except in
    channels."""
    return _Rules(family, special, prose, content).of(tools, parallel)


class _Rules:
    def __init__(
        self, family: Family, special: Mapping[str, int], prose: bool, content: Mapping[str, Any] | None
    ) -> None:
        self._family = family
        self._shape = family.calls[0]
        self._prose = prose
        self._content = content
        self._special = special
        self._mark = (pieces(self._shape.section[0] or self._shape.head) or [""])[0]
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._lines: list[str] = []

    def of(self, tools: Schemas, parallel: bool) -> str:
        calls = " | ".join(f"call_{index}" for index in range(len(tools)))
        for index, (name, schema) in enumerate(tools.items()):
            self._call(index, name, schema or ANY_OBJECT)
        several = parallel and not self._family.channels
        self._calls(several)
        start = self._channels() if self._family.channels else self._start("(WS calls)*" if several else "")
        return "\n".join([f"start: {start}", f"call: {calls}", "WS: /[ \\n]{0,2}/", *self._lines])

    def _start(self, more: str) -> str:
        if self._prose:
            return self._after_prose(more)
        if self._content is None:
            return f"WS calls {more}"
        self._json("content", self._content)
        return f"WS calls {more} | content"

    def _after_prose(self, more: str) -> str:
        """The lexer never goes back: where a marker is spelled, prose up to and with it is one lexeme."""
        bare = any(shape.bare for shape in self._family.calls)
        some = r"([ \n\t\r]*[^ \n\t\r{\[](.|\n)*)?" if bare else r"(.|\n)*"
        openings = sorted({opening for shape in self._family.calls for opening in shape.openings})
        never = [rf"~/(.|\n)*{_pattern_of(opening)}(.|\n)*/" for opening in openings]
        self._lines.append("PROSE: " + " & ".join([f"/{some}/", *never]))
        if not self._mark:
            return f"calls {more} | PROSE"
        if self._mark.startswith(tuple(self._special)):
            return f"PROSE (calls {more})?"
        self._lines.append(f"prose[suffix={json.dumps(self._mark, ensure_ascii=False)}]: /{some}/")
        return f"PROSE | prose rest {more}"

    def _calls(self, several: bool) -> None:
        """What comes after the marker that opens calls is a rule of its own."""
        shape, mark = self._shape, self._text(self._mark)
        opening, closing = shape.section
        between = self._join(self._text(shape.separator), "WS", "" if opening else mark)
        more = f"({between} call)*" if several else ""
        if opening:
            opened, closed = self._pattern(opening[len(self._mark) :]), self._pattern(closing)
            self._rule("rest", opened, "WS", "call", more, "WS" if closed else "", closed)
        else:
            self._rule("rest", "call", more)
        self._rule("calls", mark, "rest")

    def _call(self, index: int, name: str, schema: Mapping[str, Any]) -> None:
        shape, arguments = self._shape, f"arguments_{index}"
        if self._family.channels:
            head = self._text(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
            self._rule(f"call_{index}", head, arguments)
        elif not shape.head and self._content is not None and not self._mark:
            self._json(f"call_{index}", _as_object(name, shape.key, schema))
            return
        elif not shape.head:
            opening = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{shape.key}": '
            self._rule(f"call_{index}", self._text(opening), arguments, self._text("}"))
        else:
            head = shape.head if shape.section[0] else shape.head[len(self._mark) :]
            head = self._pattern(head, name=name, id=f"functions.{name}:")
            self._rule(f"call_{index}", head, arguments, "WS" if shape.tail else "", self._pattern(shape.tail))
        self._arguments(arguments, shape, schema)

    def _arguments(self, rule: str, shape: Calls, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        if shape.parameter is None and not shape.quote:
            self._json(rule, schema)
            return
        parts = []
        for index, (key, each) in enumerate(properties.items()):
            member = f"{rule}_{index}"
            self._member(member, shape, key, each if isinstance(each, dict) else {})
            parts.append((member, key in required))
        if shape.quote:
            self._noted(rule, parts)
        else:
            self._rule(rule, *(f"(WS {member})" + ("" if needed else "?") for member, needed in parts), "WS")

    def _member(self, rule: str, shape: Calls, key: str, schema: Mapping[str, Any]) -> None:
        textual = schema.get("type") == "string" and "enum" not in schema
        if shape.quote:
            self._rule(rule, self._text(f"{key}:"), f"{rule}_value")
            self._value(f"{rule}_value", schema, shape.quote, shape.quote)
            return
        assert shape.parameter is not None
        opening, endings = shape.parameter
        self._rule(rule, self._pattern(opening, key=key, string=str(textual).lower()), f"{rule}_value")
        self._value(f"{rule}_value", schema, "\n" if endings[0].startswith("\n") else "", endings[0])

    def _value(self, rule: str, schema: Mapping[str, Any], opening: str, ending: str) -> None:
        """A value up to and with its ending; in Gemma's notation only texts have an opening and an ending."""
        around = (self._text(opening), self._text(ending))
        if schema.get("type") != "string":
            self._json(f"{rule}_json", schema)
            self._rule(rule, f"{rule}_json" if self._shape.quote else f"{around[0]} {rule}_json {around[1]}")
        elif "enum" in schema:
            words = " | ".join(self._text(str(each)) for each in schema["enum"])
            self._rule(rule, around[0], f"({words})", around[1])
        elif ending in self._special:
            self._rule(rule, around[0], ANYTHING, around[1])
        else:
            self._rule(rule, around[0], f"{rule}_text")
            self._lines.append(f"{rule}_text[suffix={json.dumps(ending, ensure_ascii=False)}]: {ANYTHING}")

    def _noted(self, rule: str, parts: list[tuple[str, bool]]) -> None:
        """Members in order with commas between: after one that is there, and before one that is."""
        chosen = [member for member, needed in parts if needed] or [member for member, _ in parts[:1]]
        rest = [member for member, _ in parts if member not in chosen]
        members = self._join(' "," '.join(chosen), *(f'("," {member})?' for member in rest))
        optional = bool(parts) and not any(needed for _, needed in parts)
        self._rule(rule, '"{"', f"({members})?" if optional else members, '"}"')

    def _channels(self) -> str:
        self._thought()
        if not self._prose and self._content is None:
            return "thought? calls"
        if self._content is not None:
            self._json("content", self._content)
        self._rule("final", self._text("<|channel|>final<|message|>"), ANYTHING if self._prose else "content")
        return "thought? (calls | final)"

    def _thought(self) -> None:
        analysis = self._text("<|channel|>analysis<|message|>"), ANYTHING, self._text("<|end|>")
        self._rule("thought", *analysis, self._text("<|start|>assistant"))

    # -- words ----------------------------------------------------------------------------------------------------

    def _rule(self, name: str, *parts: str) -> None:
        self._lines.append(f"{name}: " + (self._join(*parts) or '""'))

    def _json(self, name: str, schema: Mapping[str, Any]) -> None:
        self._lines.append(f"{name}: %json {json.dumps({**schema, 'x-guidance': SPACES})}")

    def _join(self, *parts: str) -> str:
        return " ".join(part for part in parts if part)

    def _pattern(self, pattern: str, **fields: str) -> str:
        written = []
        for piece in pieces(pattern):
            if piece == "{id}":
                written += [self._text(fields["id"]), "/[0-9]{1,3}/"]
            elif piece in ("{name}", "{key}", "{string}"):
                written.append(self._text(fields[piece[1:-1]]))
            else:
                written.append('" "?' if piece == " " else self._text(piece))
        return self._join(*written)

    def _text(self, text: str) -> str:
        """A text with its special tokens by id."""
        written, done = [], 0
        for found in self._split.finditer(text):
            written += [json.dumps(text[done : found.start()], ensure_ascii=False), f"<[{self._special[found[0]]}]>"]
            done = found.end()
        written.append(json.dumps(text[done:], ensure_ascii=False))
        return self._join(*(each for each in written if each != '""'))


def _as_object(name: str, key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A call as a schema: where what stands beside it is JSON, too, only that begins alike. What the parameters refer
    to is found from the root."""
    known = {place: schema[place] for place in ("$defs", "definitions") if place in schema}
    members = {"properties": {"name": {"const": name}, key: dict(schema)}, "required": ["name", key]}
    return {"type": "object", "additionalProperties": False, **members, **known}


def _pattern_of(text: str) -> str:
    """A text within a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")

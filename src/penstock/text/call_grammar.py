"""What an answer that calls tools may be, as a Lark grammar for llguidance: the same data as the parser's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.text.parse import Schemas
from penstock.text.tool_formats import Calls, Family, pieces

ANYTHING = r"/(.|\n)*/"
BARE = r"[ \t\r\n]*(\[[ \t\r\n]*)?\{(.|\n)*"  # how an answer begins that may be a call without a marker
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def call_grammar(
    family: Family,
    tools: Schemas,
    special: Mapping[str, int],
    *,
    parallel: bool = True,
    free: bool = False,
    content: Mapping[str, Any] | None = None,
) -> str:
    """One call of one of the tools or, in parallel, several; if `free`, also an answer without a call, or text before
    one; with `content`, a schema, also what matches that instead of calls. `special` are the model's special tokens by
    their text: they are not spelled but named by id. What a model thinks before it calls is not part of it, except in
    channels."""
    return _Rules(family, special, free, content).of(tools, parallel)


class _Rules:
    def __init__(
        self, family: Family, special: Mapping[str, int], free: bool, content: Mapping[str, Any] | None
    ) -> None:
        self._family = family
        self._shape = family.calls[0]
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._free = free
        self._content = content
        opening = pieces(self._shape.section[0] or self._shape.head)[:1]
        spelled = free and not family.channels and not self._split.match("".join(opening))
        self._mark = (
            "".join(opening) if spelled else ""
        )  # of a call, in the middle of text: told apart from what follows
        self._lines: list[str] = []

    def of(self, tools: Schemas, parallel: bool) -> str:
        shape = self._shape
        calls = " | ".join(f"call_{index}" for index in range(len(tools)))
        for index, (name, schema) in enumerate(tools.items()):
            self._call(index, name, schema or ANY_OBJECT)
        several = parallel and not self._family.channels
        mark = self._text(self._mark)
        marked = self._join("" if shape.section[0] else mark, "call")
        more = f"({self._join(self._text(shape.separator), 'WS')} {marked})*" if several else ""
        opening, closing = self._pattern(self._unmarked(shape.section[0])), self._pattern(shape.section[1])
        self._rule("group", opening, "WS" if shape.section[0] else "", "call", more, "WS" if closing else "", closing)
        self._rule("calls", mark, "group")
        start = self._start("(WS calls)*" if several else "")
        return "\n".join([f"start: {start}", f"call: {calls}", "WS: /[ \\n]{0,2}/", *self._lines])

    def _start(self, more: str) -> str:
        if self._content is not None:
            self._json("content", self._content)
        if self._family.channels:
            self._thought()
            return "thought? calls" if not self._free and self._content is None else "thought? (calls | final)"
        if not self._free:
            return self._join("WS calls", more, "| content" if self._content is not None else "")
        self._talk()
        if not self._mark:
            return f"TALK | calls {more} |" if self._shape.bare else f"TALK? (calls {more})?"
        self._lines.append(f"lead[suffix={json.dumps(self._mark, ensure_ascii=False)}]: {ANYTHING}")
        return f"TALK? | lead group {more}"

    def _talk(self) -> None:
        """Text in which nothing begins like a call."""
        markers = (re.escape(opening) for shape in self._family.calls for opening in shape.openings)
        never = [rf"(.|\n)*{marker}(.|\n)*" for marker in markers]
        never += [BARE] if any(shape.bare for shape in self._family.calls) else []
        self._lines.append(rf"TALK: /(.|\n)+/ & ~/{'|'.join(never)}/")

    def _unmarked(self, pattern: str) -> str:
        return "".join(pieces(pattern)[1:]) if self._mark else pattern

    def _call(self, index: int, name: str, schema: Mapping[str, Any]) -> None:
        shape, arguments = self._shape, f"arguments_{index}"
        if self._family.channels:
            head = self._text(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
            self._rule(f"call_{index}", head, arguments)
        elif self._content is not None and shape.bare and not shape.section[0]:
            self._json(f"call_{index}", _as_object(name, shape.key, schema))
            return
        elif not shape.head:
            opening = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{shape.key}": '
            self._rule(f"call_{index}", self._text(opening), arguments, self._text("}"))
        else:
            head = shape.head if shape.section[0] else self._unmarked(shape.head)
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

    def _thought(self) -> None:
        analysis = self._text("<|channel|>analysis<|message|>"), ANYTHING, self._text("<|end|>")
        self._rule("thought", *analysis, self._text("<|start|>assistant"))
        said = ANYTHING if self._content is None else "content"
        self._rule("final", self._text("<|channel|>final<|message|>"), said)

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
    """A call as a schema. Where what stands beside it is JSON, too, the lexer tells the two apart only so: it never
    goes back. What the parameters refer to is found from the root."""
    known = {place: schema[place] for place in ("$defs", "definitions") if place in schema}
    members = {"properties": {"name": {"const": name}, key: dict(schema)}, "required": ["name", key]}
    return {"type": "object", "additionalProperties": False, **members, **known}

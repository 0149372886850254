"""Writes Lark grammars (for llguidance) of answers that call tools, from the same data as the parser."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.errors import InvalidGrammar
from penstock.text.parse import Schemas
from penstock.text.quoted_grammar import in_json_string
from penstock.text.tool_formats import CallSyntax, ToolFormat, pieces

ANYTHING = r"/(.|\n)*/"
BARE = r"[ \t\r\n]*(\[[ \t\r\n]*)?\{(.|\n)*"  # a possible call without a marker
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # JSON as templates write it
DEFINITIONS = ("$defs", "definitions")
ANY_OBJECT: dict[str, Any] = {"type": "object"}
INPUT = "input"  # argument name of tools that take a plain text
NO_INPUTS: Mapping[str, str] = MappingProxyType({})


def call_grammar(
    tool_format: ToolFormat,
    tools: Schemas,
    special: Mapping[str, int],
    *,
    parallel: bool = True,
    free: bool = False,
    content: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] = NO_INPUTS,
) -> str:
    """Returns the grammar of an answer that calls one of the tools or, in parallel, several. `inputs` are Lark grammars
    of tools whose only argument is a text.

    `free` also allows an answer without a call, and text before a call. `content` is a schema that the answer may match
    instead of calling. `special` maps the texts of special tokens to ids. Reasoning before the call is not part of the
    grammar, except in channels.
    """
    return _GrammarWriter(tool_format, special, free, content, inputs).write(tools, parallel)


class _GrammarWriter:
    """Collects the rules of one grammar."""

    def __init__(
        self,
        tool_format: ToolFormat,
        special: Mapping[str, int],
        free: bool,
        content: Mapping[str, Any] | None,
        inputs: Mapping[str, str],
    ) -> None:
        self._tool_format = tool_format
        self._syntax = tool_format.calls[0]
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._free = free
        self._content = content
        self._inputs = inputs
        opening = pieces(self._syntax.section[0] or self._syntax.head)[:1]
        spelled = free and not tool_format.channels and not self._split.match("".join(opening))
        self._mark = "".join(opening) if spelled else ""  # separate terminal for the lexer, before a call after text
        self._lines: list[str] = []

    def write(self, tools: Schemas, parallel: bool) -> str:
        syntax = self._syntax
        calls = " | ".join(f"call_{index}" for index in range(len(tools)))
        for index, (name, schema) in enumerate(tools.items()):
            self._call(index, name, schema or ANY_OBJECT)
        several = parallel and not self._tool_format.channels
        mark = self._text(self._mark)
        marked = self._join("" if syntax.section[0] else mark, "call")
        more = f"({self._join(self._text(syntax.separator), 'WS')} {marked})*" if several else ""
        opening, closing = self._pattern(self._unmarked(syntax.section[0])), self._pattern(syntax.section[1])
        self._rule("group", opening, "WS" if syntax.section[0] else "", "call", more, "WS" if closing else "", closing)
        self._rule("calls", mark, "group")
        start = self._start("(WS calls)*" if several else "")
        return "\n".join([f"start: {start}", f"call: {calls}", "WS: /[ \\n]{0,2}/", *self._lines])

    def _start(self, more: str) -> str:
        if self._content is not None:
            self._json("content", self._content)
        if self._tool_format.channels:
            self._reasoning()
            return "reasoning? calls" if not self._free and self._content is None else "reasoning? (calls | final)"
        if not self._free:
            return self._join("WS calls", more, "| content" if self._content is not None else "")
        self._free_text()
        if not self._mark:
            return f"FREE_TEXT | calls {more} |" if self._syntax.bare else f"FREE_TEXT? (calls {more})?"
        self._lines.append(f"lead[suffix={json.dumps(self._mark, ensure_ascii=False)}]: {ANYTHING}")
        return f"FREE_TEXT? | lead group {more}"

    def _free_text(self) -> None:
        markers = (re.escape(opening) for syntax in self._tool_format.calls for opening in syntax.openings)
        never = [rf"(.|\n)*{marker}(.|\n)*" for marker in markers]
        never += [BARE] if any(syntax.bare for syntax in self._tool_format.calls) else []
        self._lines.append(rf"FREE_TEXT: /(.|\n)+/ & ~/{'|'.join(never)}/")

    def _unmarked(self, pattern: str) -> str:
        return "".join(pieces(pattern)[1:]) if self._mark else pattern

    def _call(self, index: int, name: str, schema: Mapping[str, Any]) -> None:
        syntax, arguments = self._syntax, f"arguments_{index}"
        if self._tool_format.channels:
            head = self._text(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
            self._rule(f"call_{index}", head, arguments)
        elif self._content is not None and syntax.bare and not syntax.section[0]:
            if name in self._inputs:
                raise InvalidGrammar(f"the grammar of the tool {name!r} cannot be combined with text.format: drop one")
            self._json(f"call_{index}", _as_object(name, syntax.key, schema))
            return
        elif not syntax.head:
            opening = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{syntax.key}": '
            self._rule(f"call_{index}", self._text(opening), arguments, self._text("}"))
        else:
            head = syntax.head if syntax.section[0] else self._unmarked(syntax.head)
            head = self._pattern(head, name=name, id=f"functions.{name}:")
            self._rule(f"call_{index}", head, arguments, "WS" if syntax.tail else "", self._pattern(syntax.tail))
        if name in self._inputs:
            self._input(arguments, syntax, self._inputs[name])
        else:
            self._arguments(arguments, syntax, schema)

    def _input(self, rule: str, syntax: CallSyntax, grammar: str) -> None:
        if syntax.quote:
            around = self._text(f"{{{INPUT}:{syntax.quote}"), self._text(f"{syntax.quote}}}")
        elif syntax.parameter is not None:
            opening, endings = syntax.parameter
            line = "\n" if endings[0].startswith("\n") else ""
            around = self._pattern(opening, key=INPUT, string="true"), self._text(endings[0])
            around = f"WS {around[0]} {self._text(line)}", f"{around[1]} WS"
        else:
            around, grammar = (self._text(f'{{"{INPUT}": "'), self._text('"}')), in_json_string(grammar)
        self._rule(rule, around[0], f"{rule}_text", around[1])
        self._lines.append(f"{rule}_text: %lark {{\n{grammar}\n}}")

    def _arguments(self, rule: str, syntax: CallSyntax, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        if syntax.parameter is None and not syntax.quote:
            self._json(rule, schema)
            return
        parts = []
        known = {place: schema[place] for place in DEFINITIONS if place in schema}
        for index, (key, each) in enumerate(properties.items()):
            member = f"{rule}_{index}"
            self._member(member, syntax, key, {**known, **each} if isinstance(each, dict) else {})
            parts.append((member, key in required))
        if syntax.quote:
            self._gemma_object(rule, parts)
        else:
            self._rule(rule, *(f"(WS {member})" + ("" if needed else "?") for member, needed in parts), "WS")

    def _member(self, rule: str, syntax: CallSyntax, key: str, schema: Mapping[str, Any]) -> None:
        textual = schema.get("type") == "string" and "enum" not in schema
        if syntax.quote:
            self._rule(rule, self._text(f"{key}:"), f"{rule}_value")
            self._value(f"{rule}_value", schema, syntax.quote, syntax.quote)
            return
        assert syntax.parameter is not None
        opening, endings = syntax.parameter
        self._rule(rule, self._pattern(opening, key=key, string=str(textual).lower()), f"{rule}_value")
        self._value(f"{rule}_value", schema, "\n" if endings[0].startswith("\n") else "", endings[0])

    def _value(self, rule: str, schema: Mapping[str, Any], opening: str, ending: str) -> None:
        """Adds the rule of a value and its ending. In Gemma's notation only strings have an opening and an ending."""
        around = (self._text(opening), self._text(ending))
        if schema.get("type") != "string":
            self._json(f"{rule}_json", schema)
            self._rule(rule, f"{rule}_json" if self._syntax.quote else f"{around[0]} {rule}_json {around[1]}")
        elif "enum" in schema:
            words = " | ".join(self._text(str(each)) for each in schema["enum"])
            self._rule(rule, around[0], f"({words})", around[1])
        elif ending in self._special:
            self._rule(rule, around[0], ANYTHING, around[1])
        else:
            self._rule(rule, around[0], f"{rule}_text")
            self._lines.append(f"{rule}_text[suffix={json.dumps(ending, ensure_ascii=False)}]: {ANYTHING}")

    def _gemma_object(self, rule: str, parts: list[tuple[str, bool]]) -> None:
        """Adds the rule of an object: members in order, separated by commas, where some may be absent."""
        chosen = [member for member, needed in parts if needed] or [member for member, _ in parts[:1]]
        rest = [member for member, _ in parts if member not in chosen]
        members = self._join(' "," '.join(chosen), *(f'("," {member})?' for member in rest))
        optional = bool(parts) and not any(needed for _, needed in parts)
        self._rule(rule, '"{"', f"({members})?" if optional else members, '"}"')

    def _reasoning(self) -> None:
        self._rule(
            "reasoning",
            self._text("<|channel|>analysis<|message|>"),
            ANYTHING,
            self._text("<|end|>"),
            self._text("<|start|>assistant"),
        )
        answer = ANYTHING if self._content is None else "content"
        self._rule("final", self._text("<|channel|>final<|message|>"), answer)

    # ---- symbols ----

    def _rule(self, name: str, *parts: str) -> None:
        self._lines.append(f"{name}: " + (self._join(*parts) or '""'))

    def _json(self, name: str, schema: Mapping[str, Any]) -> None:
        self._lines.append(f"{name}: %json {json.dumps({**schema, 'x-guidance': SPACES})}")

    def _join(self, *parts: str) -> str:
        return " ".join(part for part in parts if part)

    def _pattern(self, pattern: str, **fields: str) -> str:
        written = []
        for piece in pieces(pattern):
            if piece == "{id}" and "{name}" in pattern:
                written.append("/[a-z0-9]{10}/")
            elif piece == "{id}":
                written += [self._text(fields["id"]), "/[0-9]{1,3}/"]
            elif piece in ("{name}", "{key}", "{string}"):
                written.append(self._text(fields[piece[1:-1]]))
            else:
                written.append('" "?' if piece == " " else self._text(piece))
        return self._join(*written)

    def _text(self, text: str) -> str:
        written, done = [], 0
        for found in self._split.finditer(text):
            written += [json.dumps(text[done : found.start()], ensure_ascii=False), f"<[{self._special[found[0]]}]>"]
            done = found.end()
        written.append(json.dumps(text[done:], ensure_ascii=False))
        return self._join(*(each for each in written if each != '""'))


def _as_object(name: str, key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a whole call. The lexer does not backtrack, so a call and other JSON must be alternatives
    of one schema. References in the parameters are resolved from the root.
    """
    known = {place: schema[place] for place in DEFINITIONS if place in schema}
    members = {"properties": {"name": {"const": name}, key: dict(schema)}, "required": ["name", key]}
    return {"type": "object", "additionalProperties": False, **members, **known}

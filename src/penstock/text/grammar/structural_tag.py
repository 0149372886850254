"""Translates vLLM's and SGLang's structural tags to llguidance's Lark.

A structural tag describes free text in which marked parts must match schemas. The older form lists `structures` and the
`triggers` that begin them. The newer one has a `format` tree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidGrammar
from penstock.text.grammar.gbnf import to_lark as gbnf_to_lark

ANY_TEXT = r"/(.|\n)*/"
MAX_DEPTH = 32
MAX_PARTS = 1024

Format = Mapping[str, Any]


def to_lark(tag: Format, special: Mapping[str, int], schema: Callable[[Any], Any]) -> str:
    """Returns the grammar of a structural tag. `special` maps the texts of special tokens to ids, and `schema` rewrites
    a JSON schema for the library.
    """
    writer = _TagWriter(special, schema)
    if "structures" in tag:
        start = writer.triggered(_from_structures(tag), "structures", 0)
    else:
        start = writer.write(_field(tag, "format", dict, ""), "format", 0)
    return "\n".join([f"start: {start}", *writer.lines])


def _from_structures(tag: Format) -> dict[str, Any]:
    tags = []
    for index, each in enumerate(_field(tag, "structures", list, "")):
        where = f"structures[{index}]"
        content = {"type": "json_schema", "json_schema": each.get("schema", {}) if isinstance(each, dict) else {}}
        begin, end = (_field(each, name, str, where) for name in ("begin", "end"))
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {"tags": tags, "triggers": _field(tag, "triggers", list, "")}


class _TagWriter:
    """Collects the rules of one grammar."""

    def __init__(self, special: Mapping[str, int], schema: Callable[[Any], Any]) -> None:
        self.lines: list[str] = []
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._schema = schema

    def write(self, format: Any, where: str, depth: int) -> str:
        if not isinstance(format, dict):
            raise InvalidGrammar(f"structural_tag: {where} must be an object; got {str(format)[:100]!r}")
        if depth > MAX_DEPTH or len(self.lines) > MAX_PARTS:
            raise InvalidGrammar(
                f"structural_tag: {where} is nested too deep, or there are too many parts: simplify it"
            )
        match format.get("type"):
            case "const_string":
                return self._text(_field(format, "value", str, where))
            case "json_schema":
                return self._rule(f"%json {json.dumps(self._schema(format.get('json_schema', {})))}")
            case "regex":
                return _regex(_field(format, "pattern", str, where))
            case "grammar":
                return self._rule(f"%lark {{\n{gbnf_to_lark(_field(format, 'grammar', str, where))}\n}}")
            case "any_text":
                return ANY_TEXT
            case "sequence":
                return self._sequence(_field(format, "elements", list, where), where, depth)
            case "or":
                elements = _field(format, "elements", list, where)
                options = [self.write(each, f"{where}.elements[{at}]", depth + 1) for at, each in enumerate(elements)]
                return f"({' | '.join(options)})"
            case "optional" | "star" | "plus" as kind:
                inner = self.write(format.get("content"), f"{where}.content", depth + 1)
                return f"({inner}){ {'optional': '?', 'star': '*', 'plus': '+'}[kind] }"
            case "tag":
                return self._tag(format, where, depth)
            case "triggered_tags":
                return self.triggered(format, where, depth)
            case "tags_with_separator":
                return self._separated(format, where, depth)
            case other:
                raise InvalidGrammar(f"structural_tag: {where}.type is not supported with this value: {other!r}")

    def triggered(self, format: Format, where: str, depth: int) -> str:
        triggers, tags = (_field(format, name, list, where) for name in ("triggers", "tags"))
        parts = []
        for trigger in triggers:
            own = [tag for tag in tags if isinstance(tag, dict) and str(tag.get("begin", "")).startswith(str(trigger))]
            if not isinstance(trigger, str) or not trigger or not own:
                raise InvalidGrammar(f"structural_tag: {where}: no tag begins with the trigger {trigger!r}")
            rest = " | ".join(self._tag(tag, where, depth, begun=trigger) for tag in own)
            parts.append(self._rule(f"{self._until(trigger)} ({rest})"))
        for tag in tags:
            if not str(_field(tag, "begin", str, where)).startswith(tuple(triggers)):
                raise InvalidGrammar(f"structural_tag: {where}: no trigger begins the tag {tag['begin']!r}")
        part = f"({' | '.join(parts)})"
        if format.get("stop_after_first"):
            return part if format.get("at_least_one") else f"({part} | {ANY_TEXT})"
        return f"({part}{'+' if format.get('at_least_one') else '*'} {ANY_TEXT})"

    def _separated(self, format: Format, where: str, depth: int) -> str:
        tags = _field(format, "tags", list, where)
        options = " | ".join(self._tag(tag, f"{where}.tags[{at}]", depth) for at, tag in enumerate(tags))
        part = f"({options})"
        if not format.get("stop_after_first"):
            separator = self._text(_field(format, "separator", str, where))
            part = f"({part} ({separator} {part})*)"
        return part if format.get("at_least_one") else f"{part}?"

    def _sequence(self, elements: Sequence[Any], where: str, depth: int) -> str:
        written, at = [], 0
        while at < len(elements):
            following = elements[at + 1] if at + 1 < len(elements) else None
            if _kind(elements[at]) == "any_text" and _kind(following) == "const_string":
                written.append(self._until(_field(following, "value", str, where)))
                at += 1
            elif _kind(elements[at]) == "any_text" and following is not None:
                raise InvalidGrammar(
                    f"structural_tag: {where}.elements[{at}]: any_text must be last, or come before a const_string"
                )
            else:
                written.append(self.write(elements[at], f"{where}.elements[{at}]", depth + 1))
            at += 1
        return f"({' '.join(written) or EMPTY})"

    def _tag(self, tag: Any, where: str, depth: int, begun: str = "") -> str:
        """Returns the symbols of a tag, without the `begun` text."""
        begin = self._text(_field(tag, "begin", str, where)[len(begun) :])
        ends = tag.get("end")
        ends = ends if isinstance(ends, list) and ends else [_field(tag, "end", str, where)]
        if _kind(tag.get("content")) == "any_text" and all(ends):
            options = " | ".join(self._until(end) for end in ends)
            return self._rule(f"{begin} ({options})")
        content = self.write(tag.get("content"), f"{where}.content", depth + 1)
        return self._rule(f"{begin} {content} ({' | '.join(self._text(end) for end in ends)})")

    # ---- symbols ----

    def _rule(self, symbols: str) -> str:
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}: {symbols}")
        return name

    def _until(self, text: str) -> str:
        if self._split.match(text):
            return f"{ANY_TEXT} {self._text(text)}"
        name = f"part_{len(self.lines)}"
        first = self._split.split(text, 1)[0]
        self.lines.append(f"{name}[lazy]: {ANY_TEXT} {_quoted(first)}")
        return f"{name} {self._text(text[len(first) :])}"

    def _text(self, text: str) -> str:
        written, done = [], 0
        for found in self._split.finditer(text):
            written += [_quoted(text[done : found.start()]), f"<[{self._special[found[0]]}]>"]
            done = found.end()
        written.append(_quoted(text[done:]))
        return " ".join(each for each in written if each != EMPTY) or EMPTY


EMPTY = '""'


def as_lark(pattern: str) -> str:
    return f"start: {_regex(pattern.removeprefix('^').removesuffix('$'))}"


def _regex(pattern: str) -> str:
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n") + "/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _kind(format: Any) -> Any:
    return format.get("type") if isinstance(format, dict) else None


def _field(holder: Any, name: str, kind: type, where: str) -> Any:
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        place = f"{where}.{name}" if where else name
        shown = "nothing" if value is None else repr(value)[:100]
        raise InvalidGrammar(f"structural_tag: {place} must be {_NAMES[kind]}; got {shown}")
    return value


_NAMES: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}

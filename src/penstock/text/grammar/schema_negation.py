"""Negates JSON schemas in schema_normal.py's normal form, where possible without `not`.

A keyword restricts values of one type only, so its negation names the type: the negation of `minimum: 3` is a number
below 3.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Schema = dict[str, Any] | bool

KINDS = ("null", "boolean", "number", "string", "array", "object")
MAX_STEPS = 2000
MAX_ALTERNATIVES = 64


class NotExpressible(Exception):
    """Signals that a negation is too large or needs keywords that do not exist."""


def negate(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Returns the schema of all values that the given one refuses; raises NotExpressible if that is impossible."""
    return _Negation(definitions).of(schema, 0)


def any_of(options: Iterable[Schema]) -> Schema:
    kept = [option for option in options if option is not False]
    if any(option is True or option == {} for option in kept):
        return True
    if len(kept) > MAX_ALTERNATIVES:
        raise NotExpressible
    return kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else False


def all_of(parts: Iterable[Schema]) -> Schema:
    kept = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in kept):
        return False
    return kept[0] if len(kept) == 1 else {"allOf": kept} if kept else True


class _Negation:
    """Negates one schema in a bounded number of steps."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._steps = 0

    def of(self, schema: Schema, depth: int) -> Schema:
        self._steps += 1
        if self._steps > MAX_STEPS or depth > 32:
            raise NotExpressible
        if isinstance(schema, bool):
            return not schema
        return any_of([self._keyword(schema, name, depth) for name in schema if name not in _COMPANIONS])

    def _keyword(self, schema: dict[str, Any], name: str, depth: int) -> Schema:
        value = schema[name]
        if (simple := _SIMPLE.get(name)) is not None:
            return simple(value)
        match name:
            case "$ref":
                return self.of(self._definitions[value.removeprefix("#/$defs/")], depth + 1)
            case "not":
                return value  # type: ignore[no-any-return]
            case "allOf":
                return any_of([self.of(each, depth + 1) for each in value])
            case "anyOf":
                return all_of([self.of(each, depth + 1) for each in value])
            case "oneOf":
                none = all_of([self.of(each, depth + 1) for each in value])
                pairs = [all_of([value[at], other]) for at in range(len(value)) for other in value[:at]]
                return any_of([none, *pairs])
            case "if":
                return self._condition(schema, depth)
            case "properties":
                return any_of([self._property(key, each, depth) for key, each in value.items()])
            case "dependentRequired":
                return any_of([_object({"required": [key]}, _not_required(names)) for key, names in value.items()])
            case "dependentSchemas":
                return any_of([_object({"required": [k]}, self.of(each, depth + 1)) for k, each in value.items()])
            case "items" if "prefixItems" not in schema:
                return {"type": "array", "contains": self.of(value, depth + 1)}
            case "contains" if schema.get("minContains", 1) == 1 and "maxContains" not in schema:
                return {"type": "array", "items": self.of(value, depth + 1)}
        raise NotExpressible

    def _property(self, key: str, schema: Schema, depth: int) -> Schema:
        refused = self.of(schema, depth + 1)
        if refused is False:
            return False
        return {"type": "object", "required": [key], "properties": {key: refused}}

    def _condition(self, schema: dict[str, Any], depth: int) -> Schema:
        met, unmet = schema["if"], self.of(schema["if"], depth + 1)
        failed = all_of([met, self.of(schema.get("then", True), depth + 1)])
        return any_of([failed, all_of([unmet, self.of(schema.get("else", True), depth + 1)])])


_COMPANIONS = ("then", "else", "minContains", "maxContains", "$defs", "x-guidance")


def _object(*parts: Schema) -> Schema:
    return all_of([{"type": "object"}, *parts])


def _not_required(names: list[str]) -> Schema:
    return any_of([{"type": "object", "properties": {name: False}} for name in names])


def _not_type(kinds: str | list[str]) -> Schema:
    given = {kinds} if isinstance(kinds, str) else set(kinds)
    if "integer" in given and "number" not in given:
        raise NotExpressible  # non-integers cannot be expressed
    others = [kind for kind in KINDS if kind not in given]
    return {"type": others} if others else False


def _not_values(values: list[Any]) -> Schema:
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    flags = [value for value in values if isinstance(value, bool)]
    nulls = [value for value in values if value is None]
    if len(texts) + len(numbers) + len(flags) + len(nulls) < len(values) or len(numbers) > MAX_ALTERNATIVES:
        raise NotExpressible
    named = {"string": texts, "number": numbers, "boolean": flags, "null": nulls}
    options: list[Schema] = [{"type": [kind for kind in KINDS if not named.get(kind)]}]
    if texts:
        options.append({"type": "string", "pattern": other_texts(texts)})
    if len(flags) == 1:
        options.append({"enum": [not flags[0]]})
    edges: list[Any] = [None, *numbers, None]
    for low, high in itertools.pairwise(edges) if numbers else ():
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        options.append({"type": "number"} | {name: bound for name, bound in bounds.items() if bound is not None})
    return any_of(options)


def other_texts(texts: Iterable[str]) -> str:
    return f"^{_other(sorted(set(texts)), 0)}$"


def _other(texts: list[str], at: int) -> str:
    """Returns the expression for the rest of a text, after `at` characters that all the texts share."""
    nexts: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > at:
            nexts.setdefault(text[at], []).append(text)
    if at > 64 or len(nexts) > MAX_ALTERNATIVES:
        raise NotExpressible
    listed = "".join(re.escape(character) if character not in "^-]\\[&~" else f"\\{character}" for character in nexts)
    options = [f"[^{listed}](?s:.)*" if listed else "(?s:.)+"]
    options += [f"{re.escape(character)}{_other(each, at + 1)}" for character, each in nexts.items()]
    ended = any(len(text) == at for text in texts)
    return f"(?:{'|'.join(options)}){'' if ended else '?'}"


def _bound(kind: str, name: str, step: int = 0) -> Callable[[Any], Schema]:
    """Returns the negation of a bound: the opposite bound, shifted by `step`."""

    def negated(value: Any) -> Schema:
        return False if step < 0 and value <= 0 else {"type": kind, name: value + step}

    return negated


_SIMPLE: dict[str, Callable[[Any], Schema]] = {
    "type": _not_type,
    "enum": _not_values,
    "const": lambda value: _not_values([value]),
    "required": _not_required,
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"),
    "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
    "minProperties": _bound("object", "maxProperties", -1),
    "maxProperties": _bound("object", "minProperties", 1),
}

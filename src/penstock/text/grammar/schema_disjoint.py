"""Decides whether JSON schemas exclude each other, so that their `oneOf` equals `anyOf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from penstock.text.grammar.schema_negation import KINDS, Schema

MAX_DEPTH = 8


def are_disjoint(options: Sequence[Schema], definitions: Mapping[str, Schema]) -> bool:
    """Returns True if no value can match two of the options; False if unknown."""
    return all(_exclude(one, other, definitions, MAX_DEPTH) for one, other in combinations(options, 2))


def _exclude(one: Schema, other: Schema, definitions: Mapping[str, Schema], depth: int) -> bool:
    if one is False or other is False:
        return True
    if one is True or other is True or depth == 0:
        return False
    one, other = _resolved(one, definitions), _resolved(other, definitions)
    for whole, part in ((one, other), (other, one)):
        for name in ("anyOf", "oneOf"):
            if name in whole and all(_exclude(each, part, definitions, depth - 1) for each in whole[name]):
                return True
        if any(_exclude(each, part, definitions, depth - 1) for each in whole.get("allOf", ())):
            return True
    if not _kinds(one) & _kinds(other) or _different_values(one, other):
        return True
    if _kinds(one) & _kinds(other) != {"object"}:
        return False
    return _different_objects(one, other, definitions, depth)


def _resolved(schema: dict[str, Any], definitions: Mapping[str, Schema]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    rest = {name: value for name, value in schema.items() if name != "$ref"}
    target = definitions.get(schema["$ref"].removeprefix("#/$defs/"), True)
    if not rest and isinstance(target, dict):
        return target
    return {**rest, "allOf": [*rest.get("allOf", ()), target]}


def _different_objects(
    one: dict[str, Any], other: dict[str, Any], definitions: Mapping[str, Schema], depth: int
) -> bool:
    for closed, needed in ((one, other), (other, one)):
        if closed.get("additionalProperties") is False and "patternProperties" not in closed:
            allowed = closed.get("properties", {})
            if any(allowed.get(key, False) is False for key in needed.get("required", ())):
                return True
    shared = one.get("properties", {}).keys() & other.get("properties", {}).keys()
    given = {*one.get("required", ()), *other.get("required", ())}
    return any(
        _exclude(one["properties"][key], other["properties"][key], definitions, depth - 1) for key in shared & given
    )


def _kinds(schema: dict[str, Any]) -> set[str]:
    if "enum" in schema or "const" in schema:
        return {_kind(value) for value in schema.get("enum", [schema.get("const")])}
    given = schema.get("type", list(KINDS))
    return {"number" if kind == "integer" else kind for kind in ([given] if isinstance(given, str) else given)}


def _kind(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def _different_values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    values = [schema.get("enum", [schema["const"]] if "const" in schema else None) for schema in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not any(value == each for value in values[0] for each in values[1])
    low = max((schema.get("minimum", float("-inf")) for schema in (one, other)), default=0)
    high = min((schema.get("maximum", float("inf")) for schema in (one, other)), default=0)
    return _kinds(one) | _kinds(other) == {"number"} and low > high

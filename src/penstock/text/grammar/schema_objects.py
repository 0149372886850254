"""Rewrites keywords about the names and the number of an object's properties."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from penstock.text.grammar.schema_negation import NotExpressible, Schema, any_of
from penstock.text.grammar.schema_validator import usable

MAX_SUBSETS = 64


def with_names(schema: dict[str, Any]) -> Schema:
    """Expresses `propertyNames` in other keywords."""
    names = schema["propertyNames"]
    if names is True:
        return True
    if names is False:
        return {"maxProperties": 0, "properties": {}}
    rest = names.keys() - {"type", "$defs"}
    if rest <= {"enum", "const"} and rest:
        allowed = [name for name in names.get("enum", [names.get("const")]) if isinstance(name, str)]
        return {"properties": dict.fromkeys(allowed, True), "additionalProperties": False}
    if rest == {"pattern"} and usable(names["pattern"]):
        return {"patternProperties": {names["pattern"]: True}, "additionalProperties": False}
    if rest <= {"minLength", "maxLength"}:
        pattern = f"^(?s:.){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        return {"patternProperties": {pattern: True}, "additionalProperties": False}
    raise NotExpressible


def with_counts(schema: dict[str, Any], plain: dict[str, Any]) -> Schema:
    """Expresses `minProperties` and `maxProperties`, or puts them into `plain` where the library supports them: next to
    properties that are all required.
    """
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    needed = list(dict.fromkeys(schema.get("required", ())))
    possible = [key for key, each in schema.get("properties", {}).items() if each is not False]
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if most is not None and (most < least or most < len(needed)):
        return _no_object()
    if closed and most is not None and most >= len({*possible, *needed}):
        most = None
    least = least if least > len(needed) else 0
    if not least and most is None:
        return True
    optional = [key for key in possible if key not in needed]
    if not optional:
        plain |= {name: schema[name] for name in ("minProperties", "maxProperties") if name in schema}
        return True
    if closed:
        return _subsets(needed, optional, least, most)
    if least == 1 and most is None and len(optional) < MAX_SUBSETS:
        none: Schema = {"properties": dict.fromkeys(optional, False), "minProperties": 1}
        return any_of([{"required": [key]} for key in optional] + [none])
    raise NotExpressible


def _no_object() -> Schema:
    return {"type": ["null", "boolean", "number", "string", "array"]}


def _subsets(needed: list[str], optional: list[str], least: int, most: int | None) -> Schema:
    sizes = range(max(least - len(needed), 0), (len(optional) if most is None else most - len(needed)) + 1)
    chosen = [subset for size in sizes for subset in combinations(optional, min(size, len(optional)))]
    if len(chosen) > MAX_SUBSETS:
        raise NotExpressible
    options: list[Schema] = [
        {"required": [*needed, *subset], "properties": {key: False for key in optional if key not in subset}}
        for subset in chosen
    ]
    return any_of([_no_object(), *({"type": "object"} | each for each in options if isinstance(each, dict))])

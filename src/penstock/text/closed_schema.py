"""Closes the objects of a JSON schema: what a small model could otherwise go on adding properties to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_OPENNESS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
_MERGED = ("allOf", "if", "then", "else", "not", "dependentSchemas", "dependencies", "$ref", "$dynamicRef")
_BRANCHES = ("anyOf", "oneOf")
_MAPS = ("properties", "patternProperties")
_VALUES = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")
_DEFINITIONS = ("$defs", "definitions")


def close_objects(schema: Schema) -> Schema:
    """Returns the schema with `additionalProperties: false` in every object that lists properties and does not say
    whether it has others. An object that is merged from several schemas stays open: each of them sees the properties
    of all."""
    closed: Schema = _Closing(schema).closed(schema, whole=True)
    return closed


class _Closing:
    """Closes one document. A schema is `whole` if no other schema is merged with it."""

    def __init__(self, root: Schema) -> None:
        self._merged = set(_merged_references(root, whole=True))

    def closed(self, schema: Any, whole: bool) -> Any:
        if not isinstance(schema, dict):
            return schema
        closed = {key: self._keyword(schema, key, value, whole) for key, value in schema.items()}
        merged = any(key in schema for key in (*_OPENNESS, *_MERGED, *_BRANCHES))
        if whole and isinstance(schema.get("properties"), dict) and not merged:
            closed["additionalProperties"] = False
        return closed

    def _keyword(self, schema: Schema, key: str, value: Any, whole: bool) -> Any:
        if key in _DEFINITIONS and isinstance(value, dict):
            return {name: self.closed(each, f"#/{key}/{name}" not in self._merged) for name, each in value.items()}
        if key in _MAPS and isinstance(value, dict):
            return {name: self.closed(each, whole=True) for name, each in value.items()}
        if key in _VALUES or key == "prefixItems":
            each_whole = True
        elif key in (*_BRANCHES, "allOf"):
            each_whole = whole and stands_alone(schema, key)
        else:
            return value
        if isinstance(value, list):
            return [self.closed(each, each_whole) for each in value]
        return self.closed(value, each_whole)


def stands_alone(schema: Schema, key: str) -> bool:
    """Returns whether the schemas under a keyword are not merged with anything beside it."""
    others = any(other in schema for other in (*_MAPS, *_MERGED, *_BRANCHES, *_OPENNESS) if other != key)
    return not others and (key != "allOf" or (isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1))


def _merged_references(schema: Any, whole: bool) -> Iterator[str]:
    """Yields the references whose targets are merged with another schema."""
    if isinstance(schema, list):
        for each in schema:
            yield from _merged_references(each, whole)
        return
    if not isinstance(schema, dict):
        return
    if isinstance(reference := schema.get("$ref"), str) and not (whole and stands_alone(schema, "$ref")):
        yield reference
    for key, value in schema.items():
        if key in (*_MAPS, *_DEFINITIONS) and isinstance(value, dict):
            for each in value.values():
                yield from _merged_references(each, whole=True)
        elif key in (*_BRANCHES, "allOf"):
            yield from _merged_references(value, whole and stands_alone(schema, key))
        elif isinstance(value, dict | list) and key not in ("enum", "const", "default", "examples"):
            yield from _merged_references(value, whole=key not in _MERGED)

"""Closes the objects of a JSON schema, so that answers have no unlisted properties.

The schema is in schema_normal.py's normal form. The closed schema accepts a subset of the original.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import InvalidGrammar
from penstock.text.grammar.schema_normal import Schema

CLOSED_ONE_OF = "closedOneOf"  # closed options next to a oneOf, whose original options may be negated
ALONE = "_alone"  # suffix of a definition's variant for values to which no other schema applies
MAX_VISITS = 100_000

Place = str | tuple[str, ...]  # location of nested values: a property's name, or one of the two below
ITEMS, OTHERS = ("items",), ("others",)
Places = Counter[Place]  # number of schemas that describe the values at each place
Visit = Callable[[Schema, Places | None], Schema]

_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas")
_OPENING = ("patternProperties", "propertyNames", "enum", "const")
_OF_OBJECTS = ("properties", "required", "dependentRequired", "minProperties", "additionalProperties", *_OPENING)
_NESTING = (*_OF_OBJECTS, "unevaluatedProperties", "items", "prefixItems", "contains")


def close_objects(root: Schema) -> Schema:
    """Adds `additionalProperties: false` to every object that lists properties and does not mention others. Where
    several schemas apply to one object (`allOf`, `$ref` and so on), it has the properties of all of them. An object
    without listed properties stays open.
    """
    return _Closing(root).whole(root) if isinstance(root, dict) else root


class _Closing:
    """Closes one document. Each schema is visited with the places described by all schemas of the same value, or with
    None if it is the only one.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._definitions: dict[str, Schema] = root.get("$defs", {})
        self._combined: dict[str, Places] = {}  # definitions that apply together with other schemas
        self._known: dict[str, Places] = {}  # places described by each definition
        self._visits = 0
        for each in (root, *self._definitions.values()):
            self._find_combined(each, None)

    def whole(self, root: dict[str, Any]) -> Schema:
        definitions = {}
        for name, each in self._definitions.items():
            definitions[name] = self._closed(each, self._combined.get(f"#/$defs/{name}"))
            definitions[name + ALONE] = self._closed(each, None)
        closed = self._closed(root, None)
        return {**closed, "$defs": definitions} if definitions and isinstance(closed, dict) else closed

    def _find_combined(self, schema: Schema, beside: Places | None) -> Schema:
        if isinstance(schema, bool):
            return schema
        places = self._combination(schema, beside)
        reference = schema.get("$ref")
        if reference is not None and places is not None:
            known = self._combined.get(reference, Counter())
            if reference not in self._combined or known | places != known:
                self._combined[reference] = known | places
                self._find_combined(self._target(reference), known | places)
        for key in ("if", "contains"):
            if key in schema:
                self._find_combined(schema[key], self._repeated(schema[key]) if key == "contains" else places)
        self._visited(schema, places, self._find_combined)
        return schema

    def _closed(self, schema: Schema, beside: Places | None) -> Schema:
        if isinstance(schema, bool) or "enum" in schema or "const" in schema:
            return schema
        closed = self._visited(schema, self._combination(schema, beside), self._closed)
        if beside is not None:
            return closed
        if _passes_on(schema):
            return {**closed, "$ref": schema["$ref"] + ALONE} if "$ref" in schema else closed
        applied = list(self._applied(schema))
        listed = [place for place in self._places(schema) if isinstance(place, str)]
        if any(map(_is_open, applied)) or not any("properties" in each for each in applied):
            return closed
        allowed = dict.fromkeys([*listed, *(name for each in applied for name in _required(each))], True)
        if all(each.get("minProperties", 0) <= len(allowed) for each in applied):
            closed["properties"] = {**allowed, **closed.get("properties", {})}
            closed["additionalProperties"] = False
        return closed

    # ---- several schemas for one value ----

    def _combination(self, schema: dict[str, Any], beside: Places | None) -> Places | None:
        """Returns the places described by all schemas of a value; None if each place is described once."""
        if beside is not None:
            return beside
        patterns = schema.get("patternProperties", {})
        overlap = bool(patterns) and ("properties" in schema or len(patterns) > 1)
        combines = any(key in schema for key in _IN_PLACE) and not _passes_on(schema)
        return self._places(schema) if overlap or combines else None

    def _places(self, schema: Schema) -> Places:
        """Returns the places described by a schema and everything that applies to the same value. Of alternatives, the
        one that describes a place most often counts.
        """
        self._count_visit()
        places: Places = Counter()
        if isinstance(schema, bool):
            return places
        places.update(list(schema.get("properties", ())))
        places.update([ITEMS] * ("items" in schema or "prefixItems" in schema))
        places.update(
            [OTHERS] * ("patternProperties" in schema or isinstance(schema.get("additionalProperties"), dict))
        )
        for each in (*schema.get("allOf", ()), *schema.get("dependentSchemas", {}).values()):
            places += self._places(each)
        for key in ("anyOf", "oneOf"):
            most: Places = Counter()
            for each in schema.get(key, ()):
                most |= self._places(each)
            places += most
        met, unmet = (("if", "then"), ("else",))
        ways = [sum((self._places(schema.get(key, True)) for key in way), Counter()) for way in (met, unmet)]
        places += ways[0] | ways[1]
        if "$ref" in schema:
            places += self._places_of(schema["$ref"])
        return places

    def _places_of(self, reference: str) -> Places:
        if reference not in self._known:
            self._known[reference] = Counter()  # ends recursion
            self._known[reference] = self._places(self._target(reference))
        return self._known[reference]

    def _applied(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        pending: list[Schema] = [schema]
        followed = set()
        while pending:
            self._count_visit()
            each = pending.pop()
            if isinstance(each, bool):
                continue
            yield each
            pending += [part for key in ("allOf", "anyOf", "oneOf") for part in each.get(key, ())]
            pending += [each[key] for key in ("if", "then", "else") if key in each]
            pending += each.get("dependentSchemas", {}).values()
            if (reference := each.get("$ref")) is not None and reference not in followed:
                followed.add(reference)
                pending.append(self._target(reference))

    def _target(self, reference: str) -> Schema:
        return self._definitions[reference.removeprefix("#/$defs/")]

    # ---- traversal ----

    def _visited(self, schema: dict[str, Any], places: Places | None, visit: Visit) -> dict[str, Any]:
        """Applies `visit` to a schema's parts. Negated parts are unchanged."""
        self._count_visit()
        visited = {key: value for key, value in schema.items() if key != "$defs"}

        def nested(each: Schema, place: Place) -> Schema:
            repeated = places is not None and (places[OTHERS] > 0 or places[place] > 1)
            return visit(each, self._repeated(each) if repeated else None)

        for key in ("properties", "patternProperties"):
            if key in schema:
                visited[key] = {name: nested(each, name) for name, each in schema[key].items()}
        for key, place in (("items", ITEMS), ("additionalProperties", OTHERS)):
            if key in schema:
                visited[key] = nested(schema[key], place)
        if "prefixItems" in schema:
            visited["prefixItems"] = [nested(each, ITEMS) for each in schema["prefixItems"]]
        for key in ("allOf", "anyOf", "oneOf"):
            if key in schema:
                visited[CLOSED_ONE_OF if key == "oneOf" else key] = [visit(each, places) for each in schema[key]]
        for key in ("then", "else"):
            if key in schema:
                visited[key] = visit(schema[key], places)
        if "dependentSchemas" in schema:
            visited["dependentSchemas"] = {key: visit(each, places) for key, each in schema["dependentSchemas"].items()}
        return visited

    def _repeated(self, schema: Schema) -> Places:
        """Returns the places of a schema that shares its value with others."""
        return self._places(schema) + self._places(schema)

    def _count_visit(self) -> None:
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise InvalidGrammar(
                f"the JSON schema cannot be used: its references make more than {MAX_VISITS} parts; simplify it"
            )


def _passes_on(schema: dict[str, Any]) -> bool:
    in_place = [key for key in _IN_PLACE if key in schema]
    if not in_place:
        return False
    alone = len(in_place) == 1 and not any(key in schema for key in _NESTING)
    return alone and (in_place[0] in ("anyOf", "oneOf", "$ref") or len(schema.get("allOf", ())) == 1)


def _is_open(schema: dict[str, Any]) -> bool:
    says = [schema.get(key, False) is not False for key in ("additionalProperties", "unevaluatedProperties")]
    return any(says) or any(key in schema for key in _OPENING)


def _required(schema: dict[str, Any]) -> list[str]:
    return [
        *schema.get("required", ()),
        *(name for names in schema.get("dependentRequired", {}).values() for name in names),
    ]

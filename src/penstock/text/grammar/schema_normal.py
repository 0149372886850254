"""Converts a JSON schema of any draft to a normal form: draft 2020-12 keywords, with all references to `$defs`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from penstock.errors import InvalidGrammar

Schema = dict[str, Any] | bool

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_DEPTH = 200  # nested schemas

_ITEMS = ("items", "additionalItems")
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
_ONE = ("additionalProperties", "contains", "propertyNames", "not", "if", "then", "else", *_UNEVALUATED, *_ITEMS)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = tuple(f"{most}{what}" for most in ("min", "max") for what in ("Length", "Items", "Properties", "Contains"))
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
_SPACING = ("whitespace_pattern", "whitespace_flexible", "item_separator", "key_separator")


class NormalSchema(NamedTuple):
    """Holds a normalized schema. `places` are the original paths of `$defs`, and `unresolved` the paths of dangling
    references.
    """

    schema: Schema
    places: dict[str, str]
    unresolved: tuple[str, ...]


def normalize(schema: Schema) -> NormalSchema:
    """Normalizes a schema; raises InvalidGrammar for an invalid one."""
    normalizer = _Normalizer(schema)
    normal = normalizer.normal(schema, "", "", 0)
    normalizer.define()
    if isinstance(normal, dict) and normalizer.definitions:
        normal["$defs"] = normalizer.definitions
    spacing = schema.get("x-guidance") if isinstance(schema, dict) else None
    if isinstance(normal, dict) and isinstance(spacing, dict):
        normal["x-guidance"] = {name: spacing[name] for name in _SPACING if name in spacing}
    return NormalSchema(normal, normalizer.places, tuple(normalizer.unresolved))


class _Normalizer:
    """Traverses one document. A path is the dotted location of a schema."""

    def __init__(self, root: Schema) -> None:
        self.definitions: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.unresolved: list[str] = []
        self._root = root
        self._names: dict[int, str] = {}  # name of each target by identity
        self._pending: list[tuple[str, Any, str]] = []  # names, targets and base URIs
        self._known: dict[str, tuple[Any, str]] = {"": (root, "")}  # URI -> schema and its path
        self._bases: dict[int, str] = {}
        draft = root.get("$schema") if isinstance(root, dict) else None
        self._old = isinstance(draft, str) and any(each in draft for each in _OLD_DRAFTS)
        self._index(root, "", "", 0)

    def _index(self, schema: Any, base: str, path: str, depth: int) -> None:
        if not isinstance(schema, dict):
            return
        if depth > MAX_DEPTH:
            raise InvalidGrammar(f"the JSON schema cannot be used: more than {MAX_DEPTH} schemas are nested at {path}")
        uri = schema.get("$id", schema.get("id"))
        if isinstance(uri, str) and not (self._old and "$ref" in schema):
            base = _joined(base, uri)
            self._known.setdefault(base.removesuffix("#"), (schema, path))
        self._bases[id(schema)] = base
        for anchor in (schema.get("$anchor"), schema.get("$dynamicAnchor")):
            if isinstance(anchor, str):
                self._known.setdefault(f"{urldefrag(base)[0]}#{anchor}", (schema, path))
        for name, each in children(schema):
            self._index(each, base, _path(path, name), depth + 1)

    # ---- normal form ----

    def normal(self, schema: Any, base: str, path: str, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidGrammar(f"the JSON schema cannot be used: {path or 'it'} must be an object, true or false")
        base = self._bases.get(id(schema), base)
        normal: dict[str, Any] = {}
        self.unresolved += [_path(path, keyword) for keyword in ("$dynamicRef", "$recursiveRef") if keyword in schema]
        if isinstance(reference := schema.get("$ref"), str):
            self._refer(normal, reference, base, _path(path, "$ref"))
            if self._old:
                return normal
        self._copy_values(schema, normal, path)
        self._copy_schemas(schema, normal, base, path, depth)
        return normal

    def _copy_values(self, schema: dict[str, Any], normal: dict[str, Any], path: str) -> None:
        kinds = schema.get("type")
        if kinds is not None:
            listed = kinds if isinstance(kinds, list) else [kinds]
            for kind in listed:
                if kind not in TYPES:
                    raise InvalidGrammar(f"the JSON schema cannot be used: {_path(path, 'type')} has {kind!r}")
            normal["type"] = kinds
        if isinstance(schema.get("enum"), list):
            normal["enum"] = schema["enum"]
        if isinstance(schema.get("required"), list):
            normal["required"] = _texts(schema["required"])
        normal |= {name: schema[name] for name in ("const",) if name in schema}
        normal |= {name: schema[name] for name in ("pattern", "format") if isinstance(schema.get(name), str)}
        normal |= {name: schema[name] for name in _NUMBERS if _is_number(schema.get(name))}
        normal |= {name: int(schema[name]) for name in _COUNTS if _is_number(schema.get(name))}
        if normal.get("multipleOf", 1) <= 0:
            raise InvalidGrammar(f"the JSON schema cannot be used: {_path(path, 'multipleOf')} must be above 0")
        if schema.get("uniqueItems") is True:
            normal["uniqueItems"] = True
        for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if schema.get(exclusive) is True and inclusive in normal:
                normal[exclusive] = normal.pop(inclusive)

    def _copy_schemas(self, schema: dict[str, Any], normal: dict[str, Any], base: str, path: str, depth: int) -> None:
        def each(value: Any, *names: str) -> Schema:
            return self.normal(value, base, _path(path, *names), depth + 1)

        for name in ("properties", "patternProperties", "dependentSchemas"):
            if isinstance(schema.get(name), dict):
                normal[name] = {key: each(value, name, key) for key, value in schema[name].items()}
        for name in ("allOf", "anyOf", "oneOf", "prefixItems"):
            if isinstance(schema.get(name), list):
                normal[name] = [each(value, name, str(at)) for at, value in enumerate(schema[name])]
        if isinstance(schema.get("items"), list):
            normal["prefixItems"] = [each(value, "items", str(at)) for at, value in enumerate(schema["items"])]
            if "additionalItems" in schema:
                normal["items"] = each(schema["additionalItems"], "additionalItems")
        for name in _ONE:
            if name in schema and name != "additionalItems" and isinstance(schema[name], dict | bool):
                normal[name] = each(schema[name], name)
        given = schema.get("dependentRequired")
        if isinstance(given, dict):
            normal["dependentRequired"] = {key: _texts(names) for key, names in given.items()}
        dependencies = schema.get("dependencies")
        for key, value in dependencies.items() if isinstance(dependencies, dict) else ():
            if isinstance(value, list):
                normal["dependentRequired"] = normal.get("dependentRequired", {}) | {key: _texts(value)}
            else:
                schemas = normal.get("dependentSchemas", {})
                normal["dependentSchemas"] = schemas | {key: each(value, "dependencies", key)}

    # ---- references ----

    def define(self) -> None:
        while self._pending:
            name, target, base = self._pending.pop()
            self.definitions[name] = self.normal(target, base, self.places[name], 0)

    def _refer(self, normal: dict[str, Any], reference: str, base: str, path: str) -> None:
        found = self._resolve(reference, base)
        if found is None:
            if reference.startswith("#"):
                raise InvalidGrammar(f"the JSON schema cannot be used: {path} is {reference!r}, which is not in it")
            self.unresolved.append(path)
            return
        target, place = found
        if isinstance(target, bool):
            normal["allOf"] = [target]
            return
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self.places[name] = place
            self._pending.append((name, target, base))
        normal["$ref"] = f"#/$defs/{name}"

    def _resolve(self, reference: str, base: str) -> tuple[Any, str] | None:
        uri, fragment = urldefrag(_joined(base, reference))
        if fragment and not fragment.startswith("/"):
            return self._known.get(f"{uri}#{fragment}")
        documents = [self._known.get(uri), self._known[""] if reference.startswith("#") else None]
        found = (_pointed(*document, unquote(fragment)) for document in documents if document is not None)
        return next((each for each in found if each is not None), None)


def _pointed(document: Any, path: str, pointer: str) -> tuple[Any, str] | None:
    """Resolves a JSON pointer to a schema and its path; None if it is not a schema."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        path = _path(path, key)
        if isinstance(document, list) and key.isdigit() and int(key) < len(document):
            document = document[int(key)]
        elif isinstance(document, dict) and key in document:
            document = document[key]
        else:
            return None
    return (document, path) if isinstance(document, dict | bool) else None


def children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _ONE:
        if isinstance(schema.get(name), dict):
            yield name, schema[name]
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}.{at}", each) for at, each in enumerate(schema[name]))
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}.{key}", each) for key, each in schema[name].items())


def _path(path: str, *names: str) -> str:
    return ".".join(each for each in (path, *names) if each)


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return urldefrag(base)[0] + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _texts(values: Any) -> list[str]:
    return [each for each in values if isinstance(each, str)] if isinstance(values, list) else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")

"""Writes docs/dialects.md from the routes and the structs of their bodies; with --check, only checks the page."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import msgspec

from penstock.server.dialects import dialects
from penstock.server.http.openapi import DocumentedRoute, document
from penstock.server.routes import OWN, STREAMS, all_routes

PAGE = Path(__file__).parents[1] / "docs" / "dialects.md"
WIDTH = 120
HEAD = """\
# The dialects: every route and field

`GET /openapi.json` has this list with types. [How the dialects behave](behaviour.md) describes the behaviour.
`scripts/make_dialect_docs.py` generates this page from the structs of request bodies: do not edit it.

A request field is one of these:

- **honoured**: it changes the answer or its form;
- **without effect**: the listed values are accepted, because they change no answer;
- **ignored**: any other field or value. The answer lists it in `penstock.ignored_fields` and in the header
  `x-penstock-ignored`. `penstock serve --strict` refuses it with a 400.

An object that is part of several bodies of a dialect is listed with the first body.
"""


def render() -> str:
    """Returns the page."""
    nobody = cast(Any, None)
    routes = all_routes(nobody, nobody)
    schemas = document(routes)
    ordered = sorted(routes, key=lambda route: route.dialect)
    sections = [_section(name, list(found), schemas) for name, found in groupby(ordered, lambda route: route.dialect)]
    return "\n".join([HEAD, *sections])


def _section(dialect: str, routes: list[DocumentedRoute], schemas: dict[str, Any]) -> str:
    packages = {each.name: each.package for each in (*dialects(), STREAMS, OWN)}
    about = import_module(packages[dialect]).__doc__ or ""
    title, text = (dialect, " ".join(about.split())) if dialect else ("server", "These routes belong to no dialect.")
    parts = [f"## {title}", _filled(text)]
    seen: set[str] = set()
    bare = [route for route in routes if _body(route, schemas) is None]
    for body, sharing in _by_body([route for route in routes if route not in bare], schemas):
        first, *others = (f"`{route.method} {route.path_format}`" for route in sharing)
        parts.append(f"### {first}")
        if others:
            parts.append(_filled(f"Also {', '.join(others)}."))
        parts.append("\n".join(_fields(body, schemas["components"]["schemas"], seen)))
    if bare:
        listed = ", ".join(f"`{route.method} {route.path_format}`" for route in bare)
        parts.append(_filled(f"Without a JSON body: {listed}."))
    return "\n\n".join(parts) + "\n"


def _body(route: DocumentedRoute, schemas: dict[str, Any]) -> dict[str, Any] | None:
    operation = schemas["paths"][route.path_format][route.method.lower()]
    content = operation.get("requestBody", {}).get("content", {})
    return content.get("application/json", {}).get("schema")


def _by_body(
    routes: list[DocumentedRoute], schemas: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], list[DocumentedRoute]]]:
    """Yields each body with the routes that read it."""
    found: dict[bytes, list[DocumentedRoute]] = {}
    for route in routes:
        found.setdefault(msgspec.json.encode(_body(route, schemas)), []).append(route)
    for body, sharing in found.items():
        yield msgspec.json.decode(body), sharing


def _fields(body: dict[str, Any], components: Mapping[str, Any], seen: set[str]) -> Iterator[str]:
    """Yields a list of the fields of a body and of those objects in it that were not `seen` in another body."""
    listed = body.get("type") == "array"
    if listed:
        seen = set()  # a list alone has no fields to show but those of its items
    waiting = [("[]" if listed else "", name) for name in _references(body)]
    while waiting:
        where, name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        properties = components[name].get("properties", {})
        honoured = [field for field, schema in properties.items() if not _without_effect(schema)]
        for field in honoured:
            place = f"{where}.{field}".removeprefix(".") + ("[]" if "items" in str(properties[field]) else "")
            waiting += [(place, nested) for nested in _references(properties[field])]
        yield _item(where or "fields", honoured, properties)


def _item(where: str, honoured: Iterable[str], properties: Mapping[str, Any]) -> str:
    shown = ", ".join(f"`{field}`" for field in honoured) or "none"
    quiet = [(field, _values(schema)) for field, schema in properties.items() if _without_effect(schema)]
    text = f"- **{where}**: {shown}"
    if quiet:
        text += "; without effect: " + ", ".join(f"`{field}`{values}" for field, values in quiet)
    return _filled(text, "  ")


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _without_effect(schema: Mapping[str, Any]) -> bool:
    """Returns whether a property came from a NoEffect table: it has no type, only values or nothing at all."""
    return not schema or (list(schema) == ["enum"] and None in schema["enum"])


def _values(schema: Mapping[str, Any]) -> str:
    given = [value for value in schema.get("enum", ()) if value is not None]
    if not schema:
        return ""
    return " (" + (" or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in given) or "null only") + ")"


def _references(tree: object) -> Iterator[str]:
    """Yields the names of the components that a schema refers to."""
    if isinstance(tree, dict):
        if "$ref" in tree:
            yield tree["$ref"].rpartition("/")[2]
        for each in tree.values():
            yield from _references(each)
    elif isinstance(tree, list):
        for each in tree:
            yield from _references(each)


def main() -> None:
    page = render()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            sys.exit(f"{PAGE} is not current: run python scripts/make_dialect_docs.py")
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

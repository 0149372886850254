"""The document of our routes: all of them, nothing else, and bodies as they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from starlette.applications import Starlette

from penstock.server import app
from penstock.server.dialects.llamacpp import adapters, server_state
from penstock.server.dialects.openai import files, stored_chats
from penstock.server.dialects.responses import fields as responses_fields
from penstock.server.dialects.vllm import sleeping, weights
from penstock.server.http import bodies
from penstock.server.http.openapi import DocumentedRoute
from penstock.server.streams import endpoints as stream_endpoints
from tests.server import toys


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch, toy_text: Any) -> list[DocumentedRoute]:
    """Those of an application, whatever is around it."""
    found: list[DocumentedRoute] = []

    def starlette(routes: list[DocumentedRoute], **rest: Any) -> Starlette:
        found.extend(routes)
        return Starlette(routes=routes, **rest)

    monkeypatch.setattr(app, "Starlette", starlette)
    app.create_app(toys.pool_of(None, toy_text, "toy"))
    return found


@pytest.fixture(scope="module")
def document(parrot: Any) -> dict[str, Any]:
    return parrot.get("/openapi.json").json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_every_route_is_documented_and_nothing_else(routes: list[DocumentedRoute], document: dict[str, Any]) -> None:
    assert {(method, path) for method, path, _ in operations(document)} == {
        (route.method, route.path_format) for route in routes
    }
    assert len({operation["operationId"] for *_, operation in operations(document)}) == len(routes)


def test_every_documented_route_answers(parrot: Any, document: dict[str, Any]) -> None:
    for method, path, _ in operations(document):
        answer = parrot.http.request(method, path.replace("{", "").replace("}", ""), content=b"{}")
        assert answer.status_code < 500, (method, path)
        assert not re.search("Not Found:|Method Not Allowed", answer.text), (method, path)


def test_bodies_are_documented_as_they_are_read(
    parrot: Any, routes: list[DocumentedRoute], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []

    def reading(context: Any, given: Any, kind: Any, no_effect: Any, where: str = "", **how: Any) -> Any:
        if not where:
            read.append((kind, no_effect))
        return read_object(context, given, kind, no_effect, where, **how)

    read_object = bodies.read_object
    for module in (
        bodies,
        files,
        responses_fields,
        stream_endpoints,
        stored_chats,
        server_state,
        sleeping,
        adapters,
        weights,
    ):
        monkeypatch.setattr(module, "read_object", reading)
    for route in routes:
        if route.path == "/generate":  # read as the dialect does that its fields name
            continue
        read.clear()
        parrot.http.request(route.method, route.path_format, content=b"{}")
        takes, no_effect, *_, query = route.operation
        told = [] if isinstance(takes, str | None) else [(takes, no_effect)]
        assert read == (told if query is None else [(query, {})]), route.path


def test_schemas_are_schemas_and_references_lead_to_them(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(re.findall(r"#/components/schemas/([^'\"]+)", str(document)))
    assert references <= schemas.keys()
    assert "x-read-as" not in str(document)


def test_what_is_within_a_body_is_described(document: dict[str, Any]) -> None:
    """An assistant's calls in OpenAI's chat are three objects deep; fields without effect have their values."""
    schemas = document["components"]["schemas"]
    body = schemas["ChatBody"]
    assert body["properties"]["user"] == {}
    assert body["properties"]["best_of"] == {"enum": [1, None]}
    assert body["additionalProperties"] is False
    assert body["properties"]["messages"]["items"] == {"$ref": "#/components/schemas/ChatMessage"}
    validator = jsonschema.Draft202012Validator({"components": {"schemas": schemas}, **body})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert validator.is_valid(asked)
    del call["function"]["arguments"]  # type: ignore[attr-defined]
    assert not validator.is_valid(asked)

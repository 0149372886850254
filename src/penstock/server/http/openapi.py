"""Serves GET /openapi.json: an OpenAPI document of the server's routes, made of the structs that bodies are read
into."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import __version__
from penstock.server.access.rights import Right
from penstock.server.http.bodies import ANY_VALUE, NoEffect
from penstock.server.http.errors import ErrorShape

if TYPE_CHECKING:
    pass

JSON = "application/json"
REF = "#/components/schemas/{name}"
READ_AS = "x-read-as"  # marks a nested object until the schemas of all structs are known

Kind = Any  # a struct, or a union of some
Schema = dict[str, Any]


class Operation(NamedTuple):
    """Describes a route's input and output: its body, the fields accepted without effect, its answer, whole and
    streamed, and its query. A string instead of a struct is a media type; a tuple lists the kinds of answer that there
    are."""

    takes: Kind | str | None = None
    no_effect: NoEffect | None = None
    answers: Kind | str | None = JSON  # None: nothing
    streams: Kind | None = None
    query: Kind | None = None

    @property
    def answer_kinds(self) -> tuple[Kind, ...]:
        return _options(self.answers)

    @property
    def stream_kinds(self) -> tuple[Kind, ...]:
        return _options(self.streams)


class DocumentedRoute(Route):
    """Is a route with the operation that documents it, and the dialect it belongs to."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        method: str,
        right: Right,
        dialect: str,
        errors: ErrorShape,
        find_operation: Callable[[], Operation],
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method = method
        self.right = right
        self.dialect = dialect
        self.errors = errors
        self._find_operation = find_operation

    @property
    def operation(self) -> Operation:
        return self._find_operation()


class NestedBody(NamedTuple):
    kinds: tuple[Kind, ...]
    no_effect: NoEffect


_nested: dict[str, NestedBody] = {}


def read_as(*kinds: Kind, no_effect: NoEffect | None = None) -> Meta:
    """Annotates a nested object of a body that is read later, as one of the kinds."""
    name = ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    _nested[name] = NestedBody(kinds, no_effect or {})
    return Meta(extra_json_schema={READ_AS: name})


def document(routes: Sequence[DocumentedRoute]) -> Schema:
    refs, components = _described(_kinds_of(routes))
    paths: defaultdict[str, Schema] = defaultdict(dict)
    for route in routes:
        paths[route.path_format][route.method.lower()] = _operation(route, refs)
    info = {"title": "Penstock", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _kinds_of(routes: Sequence[DocumentedRoute]) -> dict[Kind, NoEffect]:
    kinds: dict[Kind, NoEffect] = {}
    for route in routes:
        operation = route.operation
        answers = (*operation.answer_kinds, *operation.stream_kinds, route.errors.body)
        kinds |= {kind: {} for kind in answers if not isinstance(kind, str | None)}
    for takes, no_effect, *_ in (route.operation for route in routes):
        kinds |= {} if isinstance(takes, str | None) else {takes: no_effect or {}}
    return kinds


def _described(kinds: dict[Kind, NoEffect]) -> tuple[dict[Kind, Schema], dict[str, Schema]]:
    """Returns a reference to each kind, and the schemas of these kinds and of all nested in them."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    places = [(each, _nested[each[READ_AS]]) for each in _objects(components) if READ_AS in each]
    within = {kind: nested.no_effect for _, nested in places for kind in nested.kinds}
    if not within.keys() <= kinds.keys():
        return _described(within | kinds)
    refs = dict(zip(kinds, schemas, strict=True))
    for kind, no_effect in kinds.items():
        for name, accepted in no_effect.items():
            component = components[refs[kind]["$ref"].removeprefix(REF.format(name=""))]
            component["properties"][name] = {} if accepted is ANY_VALUE else {"enum": [*accepted, None]}
    for each, nested in places:
        options = [refs[kind] for kind in nested.kinds]
        each.clear()
        each |= {"anyOf": options} if len(options) > 1 else options[0]
    return refs, components


def _objects(tree: object) -> Iterator[Schema]:
    if isinstance(tree, dict):
        yield tree
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _objects(each)


def _operation(route: DocumentedRoute, refs: dict[Kind, Schema]) -> Schema:
    operation, error = route.operation, route.errors.body
    answered = _content(operation.answers, refs)
    if operation.streams is not None:
        chunk = {"anyOf": [*(refs[kind] for kind in operation.stream_kinds), refs[error]]}
        answered |= _lines(chunk) if route.errors.lines else _events(chunk)
    done = "2XX" if operation.answers is None else "200"
    body = {} if route.method == "HEAD" else {"content": _content(error, refs)}
    described: Schema = {
        "operationId": f"{route.method.lower()}{re.sub('[^a-z0-9]+', '_', route.path_format)}",
        "parameters": [*_path_parameters(route), *_query_parameters(operation.query)],
        "responses": {
            done: {"description": "The answer", "content": answered},
            "4XX": {"description": "The request is refused, and why"} | body,
            "5XX": {"description": "The request failed, or there is no engine"} | body,
        },
    }
    if operation.takes is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.takes, refs)}
    return described


def _path_parameters(route: DocumentedRoute) -> list[Schema]:
    text = {"type": "string"}
    return [{"name": name, "in": "path", "required": True, "schema": text} for name in route.param_convertors]


def _query_parameters(kind: Kind | None) -> list[Schema]:
    if kind is None:
        return []
    (query,) = msgspec.json.schema_components([kind])[1].values()
    return [{"name": name, "in": "query", "schema": schema} for name, schema in query["properties"].items()]


def _content(kind: Kind | str | None, refs: dict[Kind, Schema]) -> Schema:
    if kind is None:
        return {}
    if isinstance(kind, str):
        return {kind: {}}
    options = [refs[each] for each in _options(kind)]
    return {JSON: {"schema": {"anyOf": options} if len(options) > 1 else options[0]}}


def _options(kind: Kind | None) -> tuple[Kind, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def _lines(chunk: Schema) -> Schema:
    return {"application/x-ndjson": {"schema": chunk}}


def _events(chunk: Schema) -> Schema:
    """Describes one event of a stream: OpenAPI 3.1 cannot describe a stream."""
    data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", "contentMediaType": JSON, "contentSchema": chunk}]}
    return {"text/event-stream": {"schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}}

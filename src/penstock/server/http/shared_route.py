"""Joins the routes of dialects that share a path, such as /generate of SGLang and TGI: the fields of a body tell which
dialect it is in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import ConfigError, InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import NoEffect, json_of
from penstock.server.http.endpoint import AnyRouteEntry, Dialect, RouteEntry
from penstock.server.http.openapi import Operation
from penstock.server.models.served_model import ServedModel
from penstock.server.services import Services

Sharing = Sequence[tuple[Dialect, AnyRouteEntry]]


def share(sharing: Sharing, services: Services) -> RouteEntry:
    first = sharing[0][1]
    for dialect, entry in sharing:
        if not isinstance(entry, RouteEntry) or not entry.fields:
            names = " and ".join(each.name or "the server" for each, _ in sharing)
            raise ConfigError(
                f"the dialects {names} both have {entry.method} {entry.path}, but {dialect.name or 'the server'} names "
                "no fields by which its bodies are known: uninstall one, or see docs/plugins.md"
            )
    choices = [(dialect, cast(RouteEntry, entry)) for dialect, entry in sharing]
    named = " and ".join(f"{' and '.join(entry.fields)} ({dialect.title})" for dialect, entry in choices)
    quoted = " and ".join(
        f"{' and '.join(f'`{field}`' for field in entry.fields)} ({dialect.title})" for dialect, entry in choices
    )

    async def answer(served: ServedModel, http: Request, context: RequestContext) -> Response:
        body = await json_of(http, context)
        given = [(name, choice) for choice in choices for name in choice[1].fields if body.get(name) is not None]
        if len(given) != 1:
            got = " and ".join(name for name, _ in given) or "none of them"
            raise InvalidRequest(f"send exactly one of {named}; got {got}", param=choices[0][1].fields[0])
        ((_, (dialect, entry)),) = given
        others = {name for other in choices for name in _fields(*other)} - _fields(dialect, entry)
        for name in others & body.keys():
            del body[name]
        endpoint = await dialect.endpoint(entry, services)
        return await endpoint(served, http, context)

    @cache
    def operation() -> Operation:
        return _merged(
            first.path, f"Takes exactly one of {quoted}.", [each.operation(entry) for each, entry in choices]
        )

    return RouteEntry(first.method, first.path, answer, operation, first.right)


def _fields(dialect: Dialect, entry: AnyRouteEntry) -> set[str]:
    operation = dialect.operation(entry)
    return {field.encode_name for field in _declared(operation)} | (operation.no_effect or {}).keys()


def _declared(operation: Operation) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(cast(type[msgspec.Struct], operation.takes))


def _merged(path: str, about: str, operations: Sequence[Operation]) -> Operation:
    fields = {each.encode_name: each for operation in operations for each in _declared(operation)}
    declared = [(each.name, each.type, msgspec.field(default=each.default)) for each in fields.values()]
    body = msgspec.defstruct(
        f"{path.strip('/').title()}Body",
        declared,
        namespace={"__doc__": about},
        forbid_unknown_fields=True,
        kw_only=True,
    )
    no_effect: NoEffect = {name: value for each in operations for name, value in (each.no_effect or {}).items()}
    answers = tuple(kind for each in operations for kind in each.answer_kinds)
    streams = tuple(kind for each in operations for kind in each.stream_kinds)
    return Operation(body, no_effect, answers, streams)

"""Defines a dialect: its routes, the shape of its errors and its metric names.

A dialect is declared by light code and implemented by modules that are imported when they are first needed. References
name their contents: `.chat:chat` is `chat` in the module `chat` of the dialect's package. In `.files:Files.create` the
first name is a class of `Endpoints`, of which each server has one instance.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.access.rights import Right
from penstock.server.context.request_context import RequestContext
from penstock.server.http.errors import OPENAI_ERRORS, ErrorShape
from penstock.server.http.openapi import Operation
from penstock.server.models.pool import ModelPool
from penstock.server.models.served_model import ServedModel
from penstock.server.services import Services

Endpoint = Callable[[ServedModel, Request, RequestContext], Awaitable[Response]]
ServerEndpoint = Callable[[ModelPool, Request, RequestContext], Awaitable[Response]]

JSON = Operation()
TEXT = Operation(answers="text/plain")
EMPTY = Operation(answers=None)


class RouteEntry(NamedTuple):
    """Lists a route that needs a model: its method and path, its endpoint, and the operation that documents it in
    /openapi.json. Dialects that share a path name the fields of which a body for them has exactly one."""

    method: str
    path: str
    endpoint: Endpoint | str
    operation: Operation | Callable[[], Operation] | str = JSON
    right: Right = Right.USE  # also for a GET: it may load the model
    fields: tuple[str, ...] = ()


class ServerRouteEntry(NamedTuple):
    """Lists a route that is about the server, and works while no model is loaded. A GET that only reads has
    Right.READ."""

    method: str
    path: str
    endpoint: ServerEndpoint | str
    operation: Operation | str = JSON
    right: Right = Right.USE


AnyRouteEntry = RouteEntry | ServerRouteEntry


class Dialect(NamedTuple):
    """Declares a dialect. The docstring of its package introduces it in docs/dialects.md."""

    name: str  # empty: routes that belong to no dialect
    package: str
    routes: Sequence[AnyRouteEntry]
    title: str = ""  # in errors about a path that it shares with others
    errors: ErrorShape = OPENAI_ERRORS
    error_paths: tuple[str, ...] = ()  # beginnings of the paths whose errors have this shape; "/" is that path only
    error_header: str = ""  # clients of this dialect send it, on paths of OpenAI's, too
    metrics: Mapping[str, str] = {}  # sets of metric names, each with a reference to what makes it

    def find(self, reference: str) -> Any:
        return _find(self.package, reference)

    def load(self) -> None:
        """Imports the modules of all endpoints, so that no request waits for that."""
        for entry in self.routes:
            if isinstance(entry.endpoint, str):
                import_module(entry.endpoint.partition(":")[0], self.package)

    def operation(self, entry: AnyRouteEntry) -> Operation:
        given = entry.operation
        found = self.find(given) if isinstance(given, str) else given() if callable(given) else given
        assert isinstance(found, Operation)
        return found

    async def endpoint(self, entry: AnyRouteEntry, services: Services) -> Callable[..., Awaitable[Response]]:
        if not isinstance(entry.endpoint, str):
            return entry.endpoint
        module, _, name = entry.endpoint.partition(":")
        holder, _, method = name.rpartition(".")
        if not holder:
            return self.find(entry.endpoint)  # type: ignore[no-any-return]
        return getattr(await services.get(self.find(f"{module}:{holder}")), method)  # type: ignore[no-any-return]


@cache
def _find(package: str, reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(module, package), name)

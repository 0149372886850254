"""Defines what a dialect lists of its routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.access.rights import Right
from penstock.server.http.openapi import Operation
from penstock.server.models.pool import ModelPool
from penstock.server.models.served_model import ServedModel
from penstock.server.request_context import RequestContext

Endpoint = Callable[[ServedModel, Request, RequestContext], Awaitable[Response]]
ServerEndpoint = Callable[[ModelPool, Request, RequestContext], Awaitable[Response]]

JSON = Operation()
TEXT = Operation(answers="text/plain")
EMPTY = Operation(answers=None)


class RouteEntry(NamedTuple):
    """Lists a route that needs a model, which the request names: its method and path, its endpoint, and the operation
    that documents it in /openapi.json."""

    method: str
    path: str
    endpoint: Endpoint
    operation: Operation = JSON
    right: Right = Right.USE  # with any method: the model may have to be loaded


class ServerRouteEntry(NamedTuple):
    """Lists a route that is about the server, and works while no model is loaded. A GET that only reads says so."""

    method: str
    path: str
    endpoint: ServerEndpoint
    operation: Operation = JSON
    right: Right = Right.USE


AnyRouteEntry = RouteEntry | ServerRouteEntry

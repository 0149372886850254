"""Implements OpenAI's responses."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.http.endpoint import Dialect, RouteEntry, ServerRouteEntry

ROUTES = (
    RouteEntry("POST", "/v1/responses", ".endpoints:Responses.create", ".endpoints:RESPOND"),
    RouteEntry("POST", "/v1/responses/input_tokens", ".endpoints:Responses.input_tokens", ".endpoints:INPUT_TOKENS"),
    ServerRouteEntry("POST", "/v1/responses/{id}/cancel", ".endpoints:Responses.cancel", ".endpoints:CANCEL"),
    ServerRouteEntry(
        "GET", "/v1/responses/{id}", ".endpoints:Responses.retrieve", ".endpoints:RETRIEVE", right=Right.READ
    ),
    ServerRouteEntry(
        "GET",
        "/v1/responses/{id}/input_items",
        ".endpoints:Responses.input_items",
        ".endpoints:INPUT_ITEMS",
        right=Right.READ,
    ),
    ServerRouteEntry("DELETE", "/v1/responses/{id}", ".endpoints:Responses.delete"),
    RouteEntry("POST", "/responses", ".endpoints:Responses.create", ".endpoints:RESPOND"),
    RouteEntry("POST", "/responses/input_tokens", ".endpoints:Responses.input_tokens", ".endpoints:INPUT_TOKENS"),
)
DIALECT = Dialect("responses", __name__, ROUTES, title="OpenAI")

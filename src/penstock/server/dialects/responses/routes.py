"""Lists the routes of OpenAI's responses."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.responses.endpoints import CANCEL, INPUT_ITEMS, INPUT_TOKENS, RESPOND, RETRIEVE, Responses
from penstock.server.http.endpoint import AnyRouteEntry, RouteEntry, ServerRouteEntry


def responding(responses: Responses) -> tuple[AnyRouteEntry, ...]:
    """Returns the routes of responses. llama.cpp has two of them without a version."""
    return (
        RouteEntry("POST", "/v1/responses", responses.create, RESPOND),
        RouteEntry("POST", "/v1/responses/input_tokens", responses.input_tokens, INPUT_TOKENS),
        ServerRouteEntry("POST", "/v1/responses/{id}/cancel", responses.cancel, CANCEL),
        ServerRouteEntry("GET", "/v1/responses/{id}", responses.retrieve, RETRIEVE, right=Right.READ),
        ServerRouteEntry("GET", "/v1/responses/{id}/input_items", responses.input_items, INPUT_ITEMS, right=Right.READ),
        ServerRouteEntry("DELETE", "/v1/responses/{id}", responses.delete),
        RouteEntry("POST", "/responses", responses.create, RESPOND),
        RouteEntry("POST", "/responses/input_tokens", responses.input_tokens, INPUT_TOKENS),
    )

"""Serves the routes of llama.cpp's server."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.llamacpp.errors import LLAMACPP_ERRORS, PATHS
from penstock.server.http.endpoint import Dialect, RouteEntry, ServerRouteEntry

ROUTES = (
    RouteEntry("POST", "/completion", ".completion:completion", ".completion:COMPLETION"),
    RouteEntry("POST", "/completions", ".completion:completion", ".completion:COMPLETION"),
    RouteEntry("POST", "/infill", ".infill:infill", ".infill:INFILL"),
    RouteEntry("POST", "/embedding", ".embedding:embedding", ".embedding:EMBEDDING"),
    RouteEntry("POST", "/embeddings", ".embedding:embedding", ".embedding:EMBEDDING"),
    RouteEntry(
        "POST",
        "/chat/completions/input_tokens",
        "penstock.server.generation.tokens:count_chat_tokens",
        "penstock.server.generation.tokens:APPLY_TEMPLATE",
    ),
    RouteEntry(
        "POST",
        "/v1/chat/completions/input_tokens",
        "penstock.server.generation.tokens:count_chat_tokens",
        "penstock.server.generation.tokens:APPLY_TEMPLATE",
    ),
    ServerRouteEntry("POST", "/props", ".server_state:change_props", ".server_state:CHANGE_PROPS"),
    RouteEntry("GET", "/props", ".server_state:props", ".server_state:PROPS"),
    RouteEntry("GET", "/slots", ".server_state:slots", ".server_state:SLOTS"),
    RouteEntry("POST", "/slots/{id}", ".server_state:change_slot", ".server_state:SLOT_ACTION"),
    ServerRouteEntry("GET", "/lora-adapters", ".adapters:list_adapters", ".adapters:LIST_ADAPTERS", right=Right.READ),
    ServerRouteEntry(
        "POST", "/lora-adapters", ".adapters:scale_adapters", ".adapters:SCALE_ADAPTERS", right=Right.ADMIN
    ),
    ServerRouteEntry("GET", "/v1/health", "penstock.server.status.endpoints:health", right=Right.READ),
    ServerRouteEntry("GET", "/models", ".models:list_with_status", right=Right.READ),
    ServerRouteEntry("POST", "/models/load", ".models:load", ".models:NAMED", right=Right.ADMIN),
    ServerRouteEntry("POST", "/models/unload", ".models:unload", ".models:NAMED", right=Right.ADMIN),
)
DIALECT = Dialect(
    "llamacpp",
    __name__,
    ROUTES,
    title="llama.cpp",
    errors=LLAMACPP_ERRORS,
    error_paths=PATHS,
    metrics={"llamacpp": ".metrics:names"},
)

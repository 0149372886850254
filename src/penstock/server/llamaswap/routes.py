"""Lists the routes of llama-swap."""

from __future__ import annotations

from penstock.server.endpoint import TEXT, ServerRouteEntry
from penstock.server.llamaswap.endpoints import running, unload_all, unload_one

ROUTES = (
    ServerRouteEntry("GET", "/running", running),
    ServerRouteEntry("GET", "/unload", unload_all, TEXT),
    ServerRouteEntry("POST", "/api/models/unload", unload_all, TEXT),
    ServerRouteEntry("POST", "/api/models/unload/{id:path}", unload_one, TEXT),
)

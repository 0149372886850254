"""Lists the routes of llama-swap."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.llamaswap.endpoints import running, unload_all, unload_one
from penstock.server.http.endpoint import TEXT, ServerRouteEntry

ROUTES = (
    ServerRouteEntry("GET", "/running", running, right=Right.READ),
    ServerRouteEntry("GET", "/unload", unload_all, TEXT, right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/models/unload", unload_all, TEXT, right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/models/unload/{id:path}", unload_one, TEXT, right=Right.ADMIN),
)

"""Serves the routes by which clients of llama-swap see and unload models."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.http.endpoint import TEXT, Dialect, ServerRouteEntry

ROUTES = (
    ServerRouteEntry("GET", "/running", ".endpoints:running", right=Right.READ),
    ServerRouteEntry("GET", "/unload", ".endpoints:unload_all", TEXT, right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/models/unload", ".endpoints:unload_all", TEXT, right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/models/unload/{id:path}", ".endpoints:unload_one", TEXT, right=Right.ADMIN),
)
DIALECT = Dialect("llamaswap", __name__, ROUTES, title="llama-swap")

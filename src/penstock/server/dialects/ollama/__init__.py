"""Implements Ollama's API."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.ollama.errors import OLLAMA_ERRORS
from penstock.server.http.endpoint import EMPTY, TEXT, Dialect, RouteEntry, ServerRouteEntry

ROUTES = (
    RouteEntry("POST", "/api/chat", ".chat:chat", ".chat:CHAT"),
    RouteEntry("POST", "/api/generate", ".chat:generate", ".chat:GENERATE"),
    RouteEntry("POST", "/api/embed", ".embed:embed", ".embed:EMBED"),
    RouteEntry("POST", "/api/embeddings", ".embed:embed_old", ".embed:OLD_EMBED"),
    ServerRouteEntry("POST", "/api/show", ".models:show", ".models:NAMED"),
    ServerRouteEntry("POST", "/api/pull", ".models:pull", ".models:PULL", right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/push", ".models:push", right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/create", ".create:create", ".create:CREATE", right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/copy", ".create:copy", ".create:COPY", right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/blobs/{digest}", ".create:upload", ".create:UPLOAD_BLOB", right=Right.ADMIN),
    ServerRouteEntry("HEAD", "/api/blobs/{digest}", ".create:has_blob", EMPTY, right=Right.READ),
    ServerRouteEntry("DELETE", "/api/delete", ".models:delete", ".models:DELETE", right=Right.ADMIN),
    ServerRouteEntry("GET", "/", ".models:root", TEXT, right=Right.READ),
    ServerRouteEntry("GET", "/api/version", ".models:version", right=Right.READ),
    ServerRouteEntry("GET", "/api/tags", ".models:list_stored", right=Right.READ),
    ServerRouteEntry("GET", "/api/ps", ".models:running", right=Right.READ),
)
DIALECT = Dialect("ollama", __name__, ROUTES, title="Ollama", errors=OLLAMA_ERRORS, error_paths=("/api/",))

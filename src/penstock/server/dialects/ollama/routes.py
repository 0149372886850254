"""Lists the routes of Ollama's dialect."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.ollama.chat import CHAT, GENERATE, chat, generate
from penstock.server.dialects.ollama.create import COPY, CREATE, UPLOAD_BLOB, copy, create, has_blob, upload
from penstock.server.dialects.ollama.embed import EMBED, OLD_EMBED, embed, embed_old
from penstock.server.dialects.ollama.models import (
    DELETE,
    NAMED,
    PULL,
    delete,
    list_stored,
    pull,
    push,
    root,
    running,
    show,
    version,
)
from penstock.server.http.endpoint import EMPTY, TEXT, RouteEntry, ServerRouteEntry

ROUTES = (
    RouteEntry("POST", "/api/chat", chat, CHAT),
    RouteEntry("POST", "/api/generate", generate, GENERATE),
    RouteEntry("POST", "/api/embed", embed, EMBED),
    RouteEntry("POST", "/api/embeddings", embed_old, OLD_EMBED),
    ServerRouteEntry("POST", "/api/show", show, NAMED),
    ServerRouteEntry("POST", "/api/pull", pull, PULL, right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/push", push, right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/create", create, CREATE, right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/copy", copy, COPY, right=Right.ADMIN),
    ServerRouteEntry("POST", "/api/blobs/{digest}", upload, UPLOAD_BLOB, right=Right.ADMIN),
    ServerRouteEntry("HEAD", "/api/blobs/{digest}", has_blob, EMPTY, right=Right.READ),
    ServerRouteEntry("DELETE", "/api/delete", delete, DELETE, right=Right.ADMIN),
    ServerRouteEntry("GET", "/", root, TEXT, right=Right.READ),
    ServerRouteEntry("GET", "/api/version", version, right=Right.READ),
    ServerRouteEntry("GET", "/api/tags", list_stored, right=Right.READ),
    ServerRouteEntry("GET", "/api/ps", running, right=Right.READ),
)

"""Lists the routes of Ollama's dialect."""

from __future__ import annotations

from penstock.server.endpoint import EMPTY, TEXT, RouteEntry
from penstock.server.ollama.chat import CHAT, GENERATE, chat, generate
from penstock.server.ollama.create import COPY, CREATE, UPLOAD_BLOB, copy, create, has_blob, upload
from penstock.server.ollama.embed import EMBED, OLD_EMBED, embed, embed_old
from penstock.server.ollama.models import (
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

ROUTES = (
    RouteEntry("POST", "/api/chat", chat, CHAT),
    RouteEntry("POST", "/api/generate", generate, GENERATE),
    RouteEntry("POST", "/api/embed", embed, EMBED),
    RouteEntry("POST", "/api/embeddings", embed_old, OLD_EMBED),
    RouteEntry("POST", "/api/show", show, NAMED),
    RouteEntry("POST", "/api/pull", pull, PULL),
    RouteEntry("POST", "/api/push", push),
    RouteEntry("POST", "/api/create", create, CREATE),
    RouteEntry("POST", "/api/copy", copy, COPY),
    RouteEntry("POST", "/api/blobs/{digest}", upload, UPLOAD_BLOB),
    RouteEntry("HEAD", "/api/blobs/{digest}", has_blob, EMPTY),
    RouteEntry("DELETE", "/api/delete", delete, DELETE),
    RouteEntry("GET", "/", root, TEXT),
    RouteEntry("GET", "/api/version", version),
    RouteEntry("GET", "/api/tags", list_stored),
    RouteEntry("GET", "/api/ps", running),
)

"""Implements OpenAI's chat, completions, embeddings, files and batches."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.http.endpoint import Dialect, RouteEntry, ServerRouteEntry

ROUTES = (
    RouteEntry("POST", "/v1/chat/completions", ".stored_chats:StoredChats.create", ".chat:CHAT_COMPLETIONS"),
    RouteEntry("POST", "/chat/completions", ".stored_chats:StoredChats.create_as_llamacpp", ".chat:CHAT_COMPLETIONS"),
    RouteEntry("POST", "/v1/completions", ".completions:completions", ".completions:COMPLETIONS"),
    RouteEntry("POST", "/v1/embeddings", ".embeddings:embeddings", ".embeddings:EMBEDDINGS"),
    ServerRouteEntry(
        "GET",
        "/v1/chat/completions",
        ".stored_chats:StoredChats.list_all",
        ".stored_chats:LIST_CHATS",
        right=Right.READ,
    ),
    ServerRouteEntry(
        "GET",
        "/v1/chat/completions/{id}",
        ".stored_chats:StoredChats.show",
        ".stored_chats:SHOW_CHAT",
        right=Right.READ,
    ),
    ServerRouteEntry(
        "POST", "/v1/chat/completions/{id}", ".stored_chats:StoredChats.change", ".stored_chats:CHANGE_CHAT"
    ),
    ServerRouteEntry(
        "DELETE", "/v1/chat/completions/{id}", ".stored_chats:StoredChats.delete", ".stored_chats:DELETE_CHAT"
    ),
    ServerRouteEntry(
        "GET",
        "/v1/chat/completions/{id}/messages",
        ".stored_chats:StoredChats.messages",
        ".stored_chats:LIST_MESSAGES",
        right=Right.READ,
    ),
    ServerRouteEntry("POST", "/v1/files", ".files:Files.create", ".files:UPLOAD"),
    ServerRouteEntry("GET", "/v1/files", ".files:Files.list_all", ".files:LIST_FILES", right=Right.READ),
    ServerRouteEntry("GET", "/v1/files/{id}", ".files:Files.show", ".files:SHOW_FILE", right=Right.READ),
    ServerRouteEntry("GET", "/v1/files/{id}/content", ".files:Files.content", ".files:FILE_CONTENT", right=Right.READ),
    ServerRouteEntry("DELETE", "/v1/files/{id}", ".files:Files.delete"),
    ServerRouteEntry("POST", "/v1/batches", ".batches:Batches.create", ".batches:CREATE_BATCH"),
    ServerRouteEntry("GET", "/v1/batches", ".batches:Batches.list_all", ".batches:LIST_BATCHES", right=Right.READ),
    ServerRouteEntry("GET", "/v1/batches/{id}", ".batches:Batches.show", ".batches:SHOW_BATCH", right=Right.READ),
    ServerRouteEntry("POST", "/v1/batches/{id}/cancel", ".batches:Batches.cancel", ".batches:SHOW_BATCH"),
)
DIALECT = Dialect("openai", __name__, ROUTES, title="OpenAI")

"""Lists the routes of OpenAI's dialect, responses aside."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.openai.batches import CREATE_BATCH, LIST_BATCHES, SHOW_BATCH, Batches
from penstock.server.dialects.openai.chat import CHAT_COMPLETIONS
from penstock.server.dialects.openai.completions import COMPLETIONS, completions
from penstock.server.dialects.openai.embeddings import EMBEDDINGS, embeddings
from penstock.server.dialects.openai.files import FILE_CONTENT, LIST_FILES, SHOW_FILE, UPLOAD, Files
from penstock.server.dialects.openai.stored_chats import (
    CHANGE_CHAT,
    DELETE_CHAT,
    LIST_CHATS,
    LIST_MESSAGES,
    SHOW_CHAT,
    StoredChats,
)
from penstock.server.http.endpoint import AnyRouteEntry, RouteEntry, ServerRouteEntry


def generating(chats: StoredChats) -> tuple[AnyRouteEntry, ...]:
    """Returns the routes that need a model."""
    return (
        RouteEntry("POST", "/v1/chat/completions", chats.create, CHAT_COMPLETIONS),
        RouteEntry("POST", "/chat/completions", chats.create, CHAT_COMPLETIONS),  # llama.cpp's
        RouteEntry("POST", "/v1/completions", completions, COMPLETIONS),
        RouteEntry("POST", "/v1/embeddings", embeddings, EMBEDDINGS),
    )


def storing(files: Files, batches: Batches, chats: StoredChats) -> tuple[AnyRouteEntry, ...]:
    """Returns the routes of files, batches and stored chats."""
    return (
        ServerRouteEntry("GET", "/v1/chat/completions", chats.list_all, LIST_CHATS, right=Right.READ),
        ServerRouteEntry("GET", "/v1/chat/completions/{id}", chats.show, SHOW_CHAT, right=Right.READ),
        ServerRouteEntry("POST", "/v1/chat/completions/{id}", chats.change, CHANGE_CHAT),
        ServerRouteEntry("DELETE", "/v1/chat/completions/{id}", chats.delete, DELETE_CHAT),
        ServerRouteEntry("GET", "/v1/chat/completions/{id}/messages", chats.messages, LIST_MESSAGES, right=Right.READ),
        ServerRouteEntry("POST", "/v1/files", files.create, UPLOAD),
        ServerRouteEntry("GET", "/v1/files", files.list_all, LIST_FILES, right=Right.READ),
        ServerRouteEntry("GET", "/v1/files/{id}", files.show, SHOW_FILE, right=Right.READ),
        ServerRouteEntry("GET", "/v1/files/{id}/content", files.content, FILE_CONTENT, right=Right.READ),
        ServerRouteEntry("DELETE", "/v1/files/{id}", files.delete),
        ServerRouteEntry("POST", "/v1/batches", batches.create, CREATE_BATCH),
        ServerRouteEntry("GET", "/v1/batches", batches.list_all, LIST_BATCHES, right=Right.READ),
        ServerRouteEntry("GET", "/v1/batches/{id}", batches.show, SHOW_BATCH, right=Right.READ),
        ServerRouteEntry("POST", "/v1/batches/{id}/cancel", batches.cancel, SHOW_BATCH),
    )

"""Lists the routes of OpenAI's dialect, responses aside."""

from __future__ import annotations

from penstock.server.endpoint import AnyRouteEntry, RouteEntry, ServerRouteEntry
from penstock.server.openai.batches import CREATE_BATCH, LIST_BATCHES, SHOW_BATCH, Batches
from penstock.server.openai.chat import CHAT_COMPLETIONS, chat_completions
from penstock.server.openai.completions import COMPLETIONS, completions
from penstock.server.openai.embeddings import EMBEDDINGS, embeddings
from penstock.server.openai.files import FILE_CONTENT, LIST_FILES, SHOW_FILE, UPLOAD, Files

GENERATING = (
    RouteEntry("POST", "/v1/chat/completions", chat_completions, CHAT_COMPLETIONS),
    RouteEntry("POST", "/v1/completions", completions, COMPLETIONS),
    RouteEntry("POST", "/v1/embeddings", embeddings, EMBEDDINGS),
)


def storing(files: Files, batches: Batches) -> tuple[AnyRouteEntry, ...]:
    """Returns the routes of files and batches."""
    return (
        ServerRouteEntry("POST", "/v1/files", files.create, UPLOAD),
        ServerRouteEntry("GET", "/v1/files", files.list_all, LIST_FILES),
        ServerRouteEntry("GET", "/v1/files/{id}", files.show, SHOW_FILE),
        ServerRouteEntry("GET", "/v1/files/{id}/content", files.content, FILE_CONTENT),
        ServerRouteEntry("DELETE", "/v1/files/{id}", files.delete),
        ServerRouteEntry("POST", "/v1/batches", batches.create, CREATE_BATCH),
        ServerRouteEntry("GET", "/v1/batches", batches.list_all, LIST_BATCHES),
        ServerRouteEntry("GET", "/v1/batches/{id}", batches.show, SHOW_BATCH),
        ServerRouteEntry("POST", "/v1/batches/{id}/cancel", batches.cancel, SHOW_BATCH),
    )

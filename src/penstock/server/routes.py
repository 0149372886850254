"""Every route: its path, who answers it, and what it reads and tells, for /openapi.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.anthropic.messages import COUNT_TOKENS, MESSAGES, count_tokens, messages
from penstock.server.ollama.chat import CHAT, GENERATE, chat, generate
from penstock.server.ollama.create import COPY, CREATE, UPLOAD_BLOB, copy, create, has_blob, upload
from penstock.server.ollama.embed import EMBED, OLD_EMBED, embed, embed_old
from penstock.server.ollama.models import (
    DELETE,
    NAMED,
    PULL,
    delete,
    greet,
    list_stored,
    pull,
    push,
    running,
    show,
    version,
)
from penstock.server.openai.batches import CREATE_BATCH, LIST_BATCHES, SHOW_BATCH, Batches
from penstock.server.openai.chat import CHAT_COMPLETIONS, chat_completions
from penstock.server.openai.completions import COMPLETIONS, completions
from penstock.server.openai.embeddings import EMBEDDINGS, embeddings
from penstock.server.openai.files import FILE_CONTENT, LIST_FILES, SHOW_FILE, UPLOAD, Files
from penstock.server.openapi import DocumentedRoute, OpenApiDocument, Operation
from penstock.server.responses.endpoints import CANCEL, INPUT_ITEMS, INPUT_TOKENS, RESPOND, RETRIEVE, Responses
from penstock.server.served_model import ServedModel
from penstock.server.tokens import APPLY_TEMPLATE, DETOKENIZE, TOKENIZE, apply_template, detokenize, tokenize

Endpoint = Callable[[ServedModel, Request], Awaitable[Response]]
Route = Callable[..., DocumentedRoute]  # (path, endpoint, method, operation)
PLAIN_TEXT = Operation(answers="text/plain")
EMPTY = Operation(answers=None)


def all_routes(route: Route, files: Files, batches: Batches, responses: Responses) -> list[DocumentedRoute]:
    return [
        route("/v1/chat/completions", chat_completions, "POST", CHAT_COMPLETIONS),
        route("/v1/completions", completions, "POST", COMPLETIONS),
        route("/v1/models", list_models, "GET"),
        route("/v1/models/{id:path}", show_model, "GET"),
        route("/health", health, "GET"),
        route("/metrics", show_metrics, "GET", PLAIN_TEXT),
        route("/", greet, "GET", PLAIN_TEXT),
        route("/tokenize", tokenize, "POST", TOKENIZE),
        route("/detokenize", detokenize, "POST", DETOKENIZE),
        route("/apply-template", apply_template, "POST", APPLY_TEMPLATE),
        route("/v1/messages", messages, "POST", MESSAGES),
        route("/v1/messages/count_tokens", count_tokens, "POST", COUNT_TOKENS),
        route("/api/version", version, "GET"),
        route("/api/chat", chat, "POST", CHAT),
        route("/api/generate", generate, "POST", GENERATE),
        route("/api/tags", list_stored, "GET"),
        route("/api/ps", running, "GET"),
        route("/api/show", show, "POST", NAMED),
        route("/api/pull", pull, "POST", PULL),
        route("/api/delete", delete, "DELETE", DELETE),
        route("/api/embed", embed, "POST", EMBED),
        route("/api/embeddings", embed_old, "POST", OLD_EMBED),
        route("/api/create", create, "POST", CREATE),
        route("/api/copy", copy, "POST", COPY),
        route("/api/push", push, "POST"),
        route("/api/blobs/{digest}", has_blob, "HEAD", EMPTY),
        route("/api/blobs/{digest}", upload, "POST", UPLOAD_BLOB),
        route("/v1/responses", responses.create, "POST", RESPOND),
        route("/v1/responses/input_tokens", responses.input_tokens, "POST", INPUT_TOKENS),
        route("/v1/responses/{id}", responses.retrieve, "GET", RETRIEVE),
        route("/v1/responses/{id}", responses.delete, "DELETE"),
        route("/v1/responses/{id}/cancel", responses.cancel, "POST", CANCEL),
        route("/v1/responses/{id}/input_items", responses.input_items, "GET", INPUT_ITEMS),
        route("/v1/files", files.create, "POST", UPLOAD),
        route("/v1/files", files.list_all, "GET", LIST_FILES),
        route("/v1/files/{id}", files.show, "GET", SHOW_FILE),
        route("/v1/files/{id}", files.delete, "DELETE"),
        route("/v1/files/{id}/content", files.content, "GET", FILE_CONTENT),
        route("/v1/batches", batches.create, "POST", CREATE_BATCH),
        route("/v1/batches", batches.list_all, "GET", LIST_BATCHES),
        route("/v1/batches/{id}", batches.show, "GET", SHOW_BATCH),
        route("/v1/batches/{id}/cancel", batches.cancel, "POST", SHOW_BATCH),
        route("/v1/embeddings", embeddings, "POST", EMBEDDINGS),
        route("/openapi.json", OpenApiDocument(), "GET"),
    ]


# -- what is served -----------------------------------------------------------------------------------------------


async def list_models(served: ServedModel, _: Request) -> Response:
    """One object for both SDKs that ask here: OpenAI's and Anthropic's read what they know."""
    page = {"has_more": False, "first_id": served.name, "last_id": served.name}
    return _json({"object": "list", "data": [_model(served)]} | page)


async def show_model(served: ServedModel, request: Request) -> Response:
    served.check_model(request.path_params["id"])
    return _json(_model(served))


async def health(served: ServedModel, _: Request) -> Response:
    hello = served.client.hello
    if hello is None:
        return _json({"status": "unavailable", "engine": None, "message": served.client.trouble}, 503)
    return _json({"status": "ok", "engine": {"pid": hello.pid, "model": served.name}})


async def show_metrics(served: ServedModel, _: Request) -> Response:
    return Response(served.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(served: ServedModel) -> dict[str, object]:
    openai = {"id": served.name, "object": "model", "created": served.created, "owned_by": "penstock"}
    born = datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return openai | {"type": "model", "display_name": served.name, "created_at": born, "lifecycle": "active"}


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")

"""Lists every route: its method and path, its endpoint, and the operation that documents it in /openapi.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

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
    list_stored,
    pull,
    push,
    root,
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
from penstock.server.request_context import RequestContext, context_of
from penstock.server.responses.endpoints import CANCEL, INPUT_ITEMS, INPUT_TOKENS, RESPOND, RETRIEVE, Responses
from penstock.server.served_model import ServedModel
from penstock.server.sse import json_response
from penstock.server.tokens import APPLY_TEMPLATE, DETOKENIZE, TOKENIZE, apply_template, detokenize, tokenize

Endpoint = Callable[[ServedModel, Request, RequestContext], Awaitable[Response]]
Endpoints = dict[str, tuple[Endpoint, Operation]]  # by path
JSON = Operation()
TEXT = Operation(answers="text/plain")
EMPTY = Operation(answers=None)


def all_routes(served: ServedModel, files: Files, batches: Batches, responses: Responses) -> list[DocumentedRoute]:
    """Returns the routes. They are tried in this order, so those with the most requests come first."""
    endpoints: dict[str, Endpoints] = {
        "POST": _generating(responses) | _changing(files, batches, responses),
        "GET": _reading(files, batches, responses),
        "DELETE": {
            "/api/delete": (delete, DELETE),
            "/v1/responses/{id}": (responses.delete, JSON),
            "/v1/files/{id}": (files.delete, JSON),
        },
        "HEAD": {"/api/blobs/{digest}": (has_blob, EMPTY)},
    }
    return [
        _route(served, path, endpoint, method, operation)
        for method, routes in endpoints.items()
        for path, (endpoint, operation) in routes.items()
    ]


def _route(served: ServedModel, path: str, endpoint: Endpoint, method: str, operation: Operation) -> DocumentedRoute:
    async def call(request: Request) -> Response:
        return await endpoint(served, request, context_of(request.scope))

    return DocumentedRoute(path, call, method, operation)


def _generating(responses: Responses) -> Endpoints:
    """Returns the POST routes that need the engine or the tokenizer."""
    return {
        "/v1/chat/completions": (chat_completions, CHAT_COMPLETIONS),
        "/v1/completions": (completions, COMPLETIONS),
        "/v1/embeddings": (embeddings, EMBEDDINGS),
        "/v1/responses": (responses.create, RESPOND),
        "/v1/responses/input_tokens": (responses.input_tokens, INPUT_TOKENS),
        "/v1/messages": (messages, MESSAGES),
        "/v1/messages/count_tokens": (count_tokens, COUNT_TOKENS),
        "/api/chat": (chat, CHAT),
        "/api/generate": (generate, GENERATE),
        "/api/embed": (embed, EMBED),
        "/api/embeddings": (embed_old, OLD_EMBED),
        "/tokenize": (tokenize, TOKENIZE),
        "/detokenize": (detokenize, DETOKENIZE),
        "/apply-template": (apply_template, APPLY_TEMPLATE),
    }


def _changing(files: Files, batches: Batches, responses: Responses) -> Endpoints:
    """Returns the other POST routes: models, files, batches and stored responses."""
    return {
        "/api/show": (show, NAMED),
        "/api/pull": (pull, PULL),
        "/api/push": (push, JSON),
        "/api/create": (create, CREATE),
        "/api/copy": (copy, COPY),
        "/api/blobs/{digest}": (upload, UPLOAD_BLOB),
        "/v1/files": (files.create, UPLOAD),
        "/v1/batches": (batches.create, CREATE_BATCH),
        "/v1/batches/{id}/cancel": (batches.cancel, SHOW_BATCH),
        "/v1/responses/{id}/cancel": (responses.cancel, CANCEL),
    }


def _reading(files: Files, batches: Batches, responses: Responses) -> Endpoints:
    return {
        "/": (root, TEXT),
        "/health": (health, JSON),
        "/api/hello": (hello, JSON),
        "/metrics": (show_metrics, TEXT),
        "/openapi.json": (OpenApiDocument(), JSON),
        "/v1/models": (list_models, JSON),
        "/v1/models/{id:path}": (show_model, JSON),
        "/api/version": (version, JSON),
        "/api/tags": (list_stored, JSON),
        "/api/ps": (running, JSON),
        "/v1/files": (files.list_all, LIST_FILES),
        "/v1/files/{id}": (files.show, SHOW_FILE),
        "/v1/files/{id}/content": (files.content, FILE_CONTENT),
        "/v1/batches": (batches.list_all, LIST_BATCHES),
        "/v1/batches/{id}": (batches.show, SHOW_BATCH),
        "/v1/responses/{id}": (responses.retrieve, RETRIEVE),
        "/v1/responses/{id}/input_items": (responses.input_items, INPUT_ITEMS),
    }


# -- the server itself --------------------------------------------------------------------------------------------


async def list_models(served: ServedModel, _: Request, __: RequestContext) -> Response:
    """Returns one object for both SDKs that read this route: OpenAI's and Anthropic's read the fields they know."""
    page = {"has_more": False, "first_id": served.name, "last_id": served.name}
    return json_response({"object": "list", "data": [_model(served)]} | page)


async def show_model(served: ServedModel, request: Request, context: RequestContext) -> Response:
    served.check_model(request.path_params["id"], context)
    return json_response(_model(served))


async def hello(_: ServedModel, __: Request, ___: RequestContext) -> Response:
    """Answers the request by which Claude Code finds out whether it can reach a server."""
    return json_response({"message": "hello"})


async def health(served: ServedModel, _: Request, __: RequestContext) -> Response:
    hello = served.client.hello
    if hello is None:
        return json_response(
            {"status": "unavailable", "engine": None, "message": served.client.unavailable_reason}, 503
        )
    return json_response({"status": "ok", "engine": {"pid": hello.pid, "model": served.name}})


async def show_metrics(served: ServedModel, _: Request, __: RequestContext) -> Response:
    return Response(served.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(served: ServedModel) -> dict[str, object]:
    openai = {"id": served.name, "object": "model", "created": served.created, "owned_by": "penstock"}
    created = datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return openai | {"type": "model", "display_name": served.name, "created_at": created, "lifecycle": "active"}

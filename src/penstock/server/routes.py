"""Joins the routes of all dialects and of the server itself."""

from __future__ import annotations

from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.anthropic.routes import ROUTES as ANTHROPIC
from penstock.server.endpoint import TEXT, RouteEntry
from penstock.server.kserve.routes import ROUTES as KSERVE
from penstock.server.llamacpp.routes import ROUTES as LLAMACPP
from penstock.server.ollama.routes import ROUTES as OLLAMA
from penstock.server.openai.batches import Batches
from penstock.server.openai.files import Files
from penstock.server.openai.routes import GENERATING, storing
from penstock.server.openapi import DocumentedRoute, OpenApiDocument
from penstock.server.request_context import context_of
from penstock.server.rerank.routes import ROUTES as RERANK
from penstock.server.responses.endpoints import Responses
from penstock.server.responses.routes import responding
from penstock.server.served_model import ServedModel
from penstock.server.sglang.routes import ROUTES as SGLANG
from penstock.server.status import health, hello, list_models, show_metrics, show_model
from penstock.server.tgi.routes import ROUTES as TGI
from penstock.server.tokens import (
    APPLY_TEMPLATE,
    DETOKENIZE,
    TOKENIZE,
    apply_template,
    detokenize,
    tokenize,
)
from penstock.server.vllm.routes import ROUTES as VLLM

OWN = (
    RouteEntry("POST", "/tokenize", tokenize, TOKENIZE),
    RouteEntry("POST", "/detokenize", detokenize, DETOKENIZE),
    RouteEntry("POST", "/apply-template", apply_template, APPLY_TEMPLATE),
    RouteEntry("GET", "/health", health),
    RouteEntry("GET", "/metrics", show_metrics, TEXT),
    RouteEntry("GET", "/v1/models", list_models),
    RouteEntry("GET", "/v1/models/{id:path}", show_model),
    RouteEntry("GET", "/api/hello", hello),
)


def all_routes(served: ServedModel, files: Files, batches: Batches, responses: Responses) -> list[DocumentedRoute]:
    """Returns the routes. They are tried in this order, so those with the most requests come first."""
    entries = (
        *GENERATING,
        *ANTHROPIC,
        *responding(responses),
        *OLLAMA,
        *OWN,
        *LLAMACPP,
        *VLLM,
        *SGLANG,
        *TGI,
        *KSERVE,
        *RERANK,
        *storing(files, batches),
        RouteEntry("GET", "/openapi.json", OpenApiDocument()),
    )
    return [_route(served, entry) for entry in entries]


def _route(served: ServedModel, entry: RouteEntry) -> DocumentedRoute:
    @wraps(entry.endpoint)
    async def call(request: Request) -> Response:
        return await entry.endpoint(served, request, context_of(request.scope))

    return DocumentedRoute(entry.path, call, entry.method, entry.operation)

"""Joins the routes of all dialects and of the server itself."""

from __future__ import annotations

from functools import partial, wraps
from glob import escape

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.access.authentication import READING
from penstock.server.access.rights import Right, check_right
from penstock.server.dialects.anthropic.routes import ROUTES as ANTHROPIC
from penstock.server.dialects.kserve.routes import ROUTES as KSERVE
from penstock.server.dialects.llamacpp.routes import ROUTES as LLAMACPP
from penstock.server.dialects.llamaswap.routes import ROUTES as LLAMASWAP
from penstock.server.dialects.ollama.routes import ROUTES as OLLAMA
from penstock.server.dialects.openai.batches import Batches
from penstock.server.dialects.openai.files import Files
from penstock.server.dialects.openai.routes import generating, storing
from penstock.server.dialects.openai.stored_chats import StoredChats
from penstock.server.dialects.rerank.routes import ROUTES as RERANK
from penstock.server.dialects.responses.endpoints import Responses
from penstock.server.dialects.responses.routes import responding
from penstock.server.dialects.sglang.routes import ROUTES as SGLANG
from penstock.server.dialects.tgi.routes import ROUTES as TGI
from penstock.server.dialects.vllm.routes import ROUTES as VLLM
from penstock.server.generation.tokens import (
    APPLY_TEMPLATE,
    DETOKENIZE,
    TOKENIZE,
    apply_template,
    detokenize,
    tokenize,
)
from penstock.server.http.bodies import model_named_in
from penstock.server.http.endpoint import TEXT, AnyRouteEntry, RouteEntry, ServerRouteEntry
from penstock.server.http.openapi import DocumentedRoute, OpenApiDocument
from penstock.server.models.fallback_response import FallbackResponse
from penstock.server.models.pool import ModelPool
from penstock.server.request_context import RequestContext, context_of
from penstock.server.status.endpoints import health, hello, list_models, show_metrics, show_model
from penstock.server.status.engine_view import EngineView
from penstock.server.streams.endpoints import StreamEndpoints
from penstock.server.streams.routes import streaming
from penstock.server.telemetry.recent_requests import RecentRequests

OWN = (
    RouteEntry("POST", "/tokenize", tokenize, TOKENIZE),
    RouteEntry("POST", "/detokenize", detokenize, DETOKENIZE),
    RouteEntry("POST", "/apply-template", apply_template, APPLY_TEMPLATE),
    ServerRouteEntry("GET", "/health", health, right=Right.READ),
    ServerRouteEntry("GET", "/metrics", show_metrics, TEXT, right=Right.MONITOR),
    ServerRouteEntry("GET", "/v1/models", list_models, right=Right.READ),
    ServerRouteEntry("GET", "/v1/models/{id:path}", show_model, right=Right.READ),
    ServerRouteEntry("GET", "/api/hello", hello, right=Right.READ),
)


def all_routes(
    pool: ModelPool,
    files: Files,
    batches: Batches,
    responses: Responses,
    chats: StoredChats,
    streams: StreamEndpoints,
    recent: RecentRequests,
) -> list[DocumentedRoute]:
    """Returns the routes. They are tried in this order, so those with the most requests come first."""
    entries: tuple[AnyRouteEntry, ...] = (
        *generating(chats),
        *ANTHROPIC,
        *responding(responses),
        *streaming(streams),
        *OLLAMA,
        *OWN,
        *LLAMACPP,
        *VLLM,
        *SGLANG,
        *TGI,
        *KSERVE,
        *RERANK,
        *LLAMASWAP,
        *storing(files, batches, chats),
        ServerRouteEntry("GET", "/engine", EngineView(recent), right=Right.READ),
        ServerRouteEntry("GET", "/openapi.json", OpenApiDocument(), right=Right.READ),
    )
    return [_route(pool, entry, streams) for entry in entries]


def _route(pool: ModelPool, entry: AnyRouteEntry, streams: StreamEndpoints) -> DocumentedRoute:
    @wraps(entry.endpoint)
    async def call(request: Request) -> Response:
        context = context_of(request.scope)
        check_right(entry.right, f"{entry.method} {request.url.path}", context.payer, context.page)
        if isinstance(entry, ServerRouteEntry):
            return await entry.endpoint(pool, request, context)
        if (rest := await streams.sent_again(request, context)) is not None:
            return rest
        name = await named_model(request, context)
        answer = partial(_answer, pool, entry, request, context, name)
        if generates and len(models := pool.with_fallbacks(name)) > 1:
            return FallbackResponse(models, answer, context, pool.metrics)
        return await answer(None)

    generates = entry.method == "POST" and entry.operation.streams is not None
    return DocumentedRoute(entry.path, call, entry.method, entry.operation, entry.right)


async def _answer(
    pool: ModelPool,
    entry: RouteEntry,
    request: Request,
    context: RequestContext,
    named: str | None,
    fallback: str | None,
) -> Response:
    """Answers a request by the model that it has named or, if that is given, by a fallback."""
    name = fallback or named
    if pool.foreign is not None and (model := pool.foreign_model(name, context)) is not None:
        context.check_allowed(model)
        context.model = model
        return await pool.foreign.answer(model, request, context)
    served = await pool.use(name, context)
    if fallback is not None and named is not None:  # the dialect finds the request's own name in the body
        served = served._replace(aliases=(*served.aliases, escape(named), escape(named.removesuffix(":latest"))))
    return await entry.endpoint(served, request, context)


async def named_model(request: Request, context: RequestContext) -> str | None:
    """Returns the model that a request names in its path, its query or its body; None: it names none."""
    if "model" in request.path_params:
        return str(request.path_params["model"])
    if request.method in READING:
        return request.query_params.get("model")
    return await model_named_in(request, context)

"""Joins the routes of all dialects and of the server itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from glob import escape

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from penstock.server.access.authentication import READING
from penstock.server.access.rights import Right, check_right
from penstock.server.context.request_context import RequestContext, context_of
from penstock.server.dialects import dialects
from penstock.server.http.bodies import model_named_in
from penstock.server.http.endpoint import TEXT, AnyRouteEntry, Dialect, Endpoint, RouteEntry, ServerRouteEntry
from penstock.server.http.errors import OPENAI_ERRORS, ErrorShape
from penstock.server.http.openapi import DocumentedRoute
from penstock.server.http.shared_route import share
from penstock.server.models.fallback_response import FallbackResponse
from penstock.server.models.pool import ModelPool
from penstock.server.services import Services
from penstock.server.streams.endpoints import sent_again

TOKENS, STATUS = "penstock.server.generation.tokens:", "penstock.server.status."
OWN = Dialect(
    "",
    "penstock.server",
    (
        RouteEntry("POST", "/tokenize", TOKENS + "tokenize", TOKENS + "TOKENIZE"),
        RouteEntry("POST", "/detokenize", TOKENS + "detokenize", TOKENS + "DETOKENIZE"),
        RouteEntry("POST", "/apply-template", TOKENS + "apply_template", TOKENS + "APPLY_TEMPLATE"),
        ServerRouteEntry("GET", "/health", STATUS + "endpoints:health", right=Right.READ),
        ServerRouteEntry("GET", "/metrics", STATUS + "endpoints:show_metrics", TEXT, right=Right.MONITOR),
        ServerRouteEntry("GET", "/v1/models", STATUS + "endpoints:list_models", right=Right.READ),
        ServerRouteEntry("GET", "/v1/models/{id:path}", STATUS + "endpoints:show_model", right=Right.READ),
        ServerRouteEntry("GET", "/api/hello", STATUS + "endpoints:hello", right=Right.READ),
        ServerRouteEntry("GET", "/engine", STATUS + "engine_view:EngineView.show", right=Right.READ),
        ServerRouteEntry("GET", "/openapi.json", STATUS + "openapi_document:OpenApiDocument.show", right=Right.READ),
    ),
)
STREAM_ENDPOINTS = ".endpoints:StreamEndpoints."
STREAMS = Dialect(
    "streams",
    "penstock.server.streams",
    (
        ServerRouteEntry(
            "GET", "/v1/streams/{id}", STREAM_ENDPOINTS + "read", ".endpoints:READ_STREAM", right=Right.READ
        ),
        ServerRouteEntry("DELETE", "/v1/streams/{id}", STREAM_ENDPOINTS + "delete", ".endpoints:DELETE_STREAM"),
    ),
)


class ErrorShapes:
    """Knows how errors are written for the clients of each path."""

    def __init__(self, all_dialects: Sequence[Dialect]) -> None:
        self._beginnings = [(path, each.errors) for each in all_dialects for path in each.error_paths]
        self._headers = [(each.error_header, each.errors) for each in all_dialects if each.error_header]

    def of_path(self, path: str) -> ErrorShape:
        return next((shape for beginning, shape in self._beginnings if _begins(path, beginning)), OPENAI_ERRORS)

    def of_request(self, scope: Scope) -> ErrorShape:
        """Returns the shape for a request. Where dialects share a path, a header that clients always send decides."""
        shape = self.of_path(scope["path"])
        if shape is not OPENAI_ERRORS or not self._headers:
            return shape
        given = Headers(scope=scope)
        return next((other for header, other in self._headers if header in given), shape)


def _begins(path: str, beginning: str) -> bool:
    return path == beginning if beginning == "/" else path.startswith(beginning)


def error_shapes() -> ErrorShapes:
    return ErrorShapes(dialects())


def all_routes(pool: ModelPool, services: Services) -> list[DocumentedRoute]:
    """Returns the routes. They are tried in this order: those without parameters first, of which another might accept
    the path, and the busiest dialects before others."""
    entries: dict[tuple[str, str], list[tuple[Dialect, AnyRouteEntry]]] = {}
    for dialect in (*dialects(), STREAMS, OWN):
        for entry in dialect.routes:
            entries.setdefault((entry.method, entry.path), []).append((dialect, entry))
    shapes = error_shapes()
    ordered = sorted(entries.values(), key=lambda sharing: "{" in sharing[0][1].path)
    return [_route(pool, services, sharing, shapes) for sharing in ordered]


def _route(
    pool: ModelPool, services: Services, sharing: list[tuple[Dialect, AnyRouteEntry]], shapes: ErrorShapes
) -> DocumentedRoute:
    dialect, entry = sharing[0] if len(sharing) == 1 else (OWN, share(sharing, services))
    find_operation = partial(dialect.operation, entry)

    bound: Callable[..., Awaitable[Response]] | None = None  # once the first request has imported it
    generates = False

    async def call(request: Request) -> Response:
        nonlocal bound, generates
        context = context_of(request.scope)
        check_right(entry.right, f"{entry.method} {request.url.path}", context.caller.payer, context.caller.page)
        if bound is None:
            generates = entry.method == "POST" and find_operation().streams is not None
            bound = await dialect.endpoint(entry, services)
        endpoint = bound
        if isinstance(entry, ServerRouteEntry):
            return await endpoint(pool, request, context)
        if (rest := await sent_again(services.streams, request, context)) is not None:
            return rest
        named = await named_model(request, context)
        answer = partial(_answer, pool, endpoint, request, context, named)
        if generates and pool.settings.fallbacks and len(models := pool.models.with_fallbacks(named)) > 1:
            return FallbackResponse(models, answer, context, pool.metrics)
        return await answer(None)

    return DocumentedRoute(
        entry.path, call, entry.method, entry.right, dialect.name, shapes.of_path(entry.path), find_operation
    )


async def _answer(
    pool: ModelPool,
    endpoint: Endpoint,
    request: Request,
    context: RequestContext,
    named: str | None,
    fallback: str | None,
) -> Response:
    """Answers a request by the model that it has named or, if that is given, by a fallback."""
    name = fallback or named
    if pool.foreign is not None and (model := pool.models.foreign_model(name, context)) is not None:
        context.caller.check_allowed(model)
        context.notes.model = model
        return await pool.foreign.answer(model, request, context)
    served = await pool.use(name, context)
    if fallback is not None and named is not None:  # the dialect finds the request's own name in the body
        served = served._replace(aliases=(*served.aliases, escape(named), escape(named.removesuffix(":latest"))))
    return await endpoint(served, request, context)


async def named_model(request: Request, context: RequestContext) -> str | None:
    """Returns the model that a request names in its path, its query or its body; None: it names none."""
    if "model" in request.path_params:
        return str(request.path_params["model"])
    if request.method in READING:
        return request.query_params.get("model")
    return await model_named_in(request, context)

"""Answers with errors, in the shape of the request's dialect: OpenAI's, Anthropic's, Ollama's, llama.cpp's, KServe's or
that of Text Generation Inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from math import ceil
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import (
    ContextTooLong,
    EngineUnavailable,
    Forbidden,
    Gone,
    InvalidRequest,
    NotFound,
    NotSupported,
    Overloaded,
    PenstockError,
    PoisonedRequest,
    RateLimited,
    Unauthorized,
)
from penstock.server.request_context import context_of

RETRY_AFTER = "1"  # seconds: about as long as an engine takes to restart
CLIENT_LEFT = Response(status_code=499)  # nobody reads it
ANTHROPIC_OVERLOADED = 529
ANTHROPIC_STATUSES = {503: ANTHROPIC_OVERLOADED}
STATUSES = {"request_timeout": 408, "request_too_large": 413, "uri_too_long": 414}  # of codes of InvalidRequest

OPENAI_TYPES = {403: "permission_error", 429: "rate_limit_error"}
TGI_TYPES = {429: "overloaded", 503: "overloaded"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    ANTHROPIC_OVERLOADED: "overloaded_error",
}
LLAMACPP_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
LLAMACPP_PATHS = (  # those that have no dialect beside llama.cpp's
    "/apply-template",
    "/chat/",
    "/completion",
    "/embedding",
    "/infill",
    "/lora-adapters",
    "/models",
    "/props",
    "/responses",
    "/slots",
)


class OpenAiErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAiErrorBody(msgspec.Struct):
    error: OpenAiErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    error: AnthropicErrorDetail
    request_id: str | None = None


class OllamaErrorBody(msgspec.Struct):
    error: str


class KserveErrorBody(msgspec.Struct):
    error: str


class TgiErrorBody(msgspec.Struct):
    error: str
    error_type: str


class LlamaCppErrorDetail(msgspec.Struct):
    code: int
    message: str
    type: str
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class LlamaCppErrorBody(msgspec.Struct):
    error: LlamaCppErrorDetail


def status_of(error: PenstockError) -> int:
    match error:
        case InvalidRequest():
            return STATUSES.get(error.code, 400)
        case Unauthorized():
            return 401
        case Forbidden():
            return 403
        case Gone():
            return 410
        case NotFound():
            return 404
        case NotSupported():
            return 501
        case RateLimited():
            return 429
        case EngineUnavailable() | Overloaded():
            return 503
    return 500


def headers_of(error: PenstockError) -> dict[str, str]:
    match status_of(error):
        case 401:
            return {"www-authenticate": "Bearer"}
        case 408 | 413:
            return {"connection": "close"}  # what is left of the body is not waited for
        case 503:
            return {"retry-after": RETRY_AFTER}
    if isinstance(error, PoisonedRequest):
        return {"x-should-retry": "false"}  # OpenAI's and Anthropic's clients send it again otherwise
    if isinstance(error, RateLimited):
        return {"retry-after": str(ceil(error.retry_after)), "retry-after-ms": str(ceil(error.retry_after * 1000))}
    return {}


class Refusal(NamedTuple):
    """Holds what an error's body is made of: the error, its HTTP status and the id of the request."""

    error: PenstockError
    status: int
    request_id: str


class ErrorShape(NamedTuple):
    """Says how a dialect writes errors."""

    body: type[msgspec.Struct]
    make: Callable[[Refusal], msgspec.Struct]
    statuses: Mapping[int, int] = {}  # those that the dialect's clients expect in place of ours

    def encode(self, error: PenstockError, status: int = 0, request_id: str = "") -> bytes:
        """Returns the error as JSON. `status` is the error's own unless it is given."""
        return msgspec.json.encode(self.make(Refusal(error, status or status_of(error), request_id)))


def _openai(refusal: Refusal) -> OpenAiErrorBody:
    error, status = refusal.error, status_of(refusal.error)
    kind = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.param if isinstance(error, InvalidRequest) else None
    return OpenAiErrorBody(OpenAiErrorDetail(error.message, kind, param, error.code))


def _anthropic(refusal: Refusal) -> AnthropicErrorBody:
    status = ANTHROPIC_STATUSES.get(refusal.status, refusal.status)
    detail = AnthropicErrorDetail(ANTHROPIC_TYPES.get(status, "invalid_request_error"), refusal.error.message)
    return AnthropicErrorBody(detail, refusal.request_id or None)


def _ollama(refusal: Refusal) -> OllamaErrorBody:
    return OllamaErrorBody(refusal.error.message)


def _kserve(refusal: Refusal) -> KserveErrorBody:
    return KserveErrorBody(refusal.error.message)


def _tgi(refusal: Refusal) -> TgiErrorBody:
    kind = TGI_TYPES.get(refusal.status, "validation" if refusal.status < 500 else "generation")
    return TgiErrorBody(refusal.error.message, kind)


def _llamacpp(refusal: Refusal) -> LlamaCppErrorBody:
    error, kind = refusal.error, LLAMACPP_TYPES.get(refusal.status, "invalid_request_error")
    detail = LlamaCppErrorDetail(refusal.status, error.message, kind)
    if isinstance(error, ContextTooLong):
        detail.type = "exceed_context_size_error"
        detail.message = f"the request exceeds the available context size: {error.message}"
        detail.n_prompt_tokens = UNSET if error.prompt_tokens is None else error.prompt_tokens
        detail.n_ctx = UNSET if error.context is None else error.context
    return LlamaCppErrorBody(detail)


OPENAI_ERRORS = ErrorShape(OpenAiErrorBody, _openai)
ANTHROPIC_ERRORS = ErrorShape(AnthropicErrorBody, _anthropic, ANTHROPIC_STATUSES)
OLLAMA_ERRORS = ErrorShape(OllamaErrorBody, _ollama)
KSERVE_ERRORS = ErrorShape(KserveErrorBody, _kserve)
TGI_ERRORS = ErrorShape(TgiErrorBody, _tgi, {400: 422})
LLAMACPP_ERRORS = ErrorShape(LlamaCppErrorBody, _llamacpp)
SHAPES = (  # by the beginning of a path; the first that fits counts
    ("/api/", OLLAMA_ERRORS),
    ("/v1/messages", ANTHROPIC_ERRORS),
    ("/v2/models", KSERVE_ERRORS),
    ("/generate_stream", TGI_ERRORS),
    *((path, LLAMACPP_ERRORS) for path in LLAMACPP_PATHS),
)


def error_shape(path: str) -> ErrorShape:
    """Returns how errors are written in the dialect that a path belongs to."""
    if path == "/":
        return TGI_ERRORS
    return next((shape for beginning, shape in SHAPES if path.startswith(beginning)), OPENAI_ERRORS)


def error_response(request: Request, error: PenstockError) -> Response:
    return respond(request, error, status_of(error), headers_of(error))


def respond(request: Request, error: PenstockError, status: int, headers: dict[str, str] | None = None) -> Response:
    """Returns the error in the request's dialect. The path decides; where two dialects share one, the header that
    Anthropic's clients always send does."""
    context = context_of(request.scope)
    context.outcome.fail(error)
    shape = error_shape(request.url.path)
    if shape is OPENAI_ERRORS and "anthropic-version" in request.headers:
        shape = ANTHROPIC_ERRORS
    body = shape.encode(error, status, context.id)
    return Response(body, shape.statuses.get(status, status), headers, "application/json")


async def on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    return error_response(request, error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answers a request for a route that does not exist, or not with this method."""
    assert isinstance(error, HTTPException)
    refusal = InvalidRequest(
        f"{error.detail}: {request.method} {request.url.path}", code=HTTPStatus(error.status_code).name.lower()
    )
    return respond(request, refusal, error.status_code, dict(error.headers or {}))


async def on_bug(request: Request, _: Exception) -> Response:
    id = context_of(request.scope).id
    error = PenstockError(f"the server failed while it answered request {id}; its log has the details")
    error.code = "internal_error"
    headers = {"connection": "close"}  # the HTTP server drops a connection whose handler failed
    return respond(request, error, 500, headers)


async def on_missing_package(request: Request, error: Exception) -> Response:
    """Refuses what needs a package that is not installed."""
    assert isinstance(error, ModuleNotFoundError)
    return error_response(
        request,
        NotSupported(f"this needs the Python package {error.name!r}, which the server does not have: install it there"),
    )


async def on_client_left(_: Request, __: Exception) -> Response:
    return CLIENT_LEFT

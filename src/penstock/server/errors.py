"""Answers with errors, in the shape of the request's dialect: OpenAI's, Anthropic's, Ollama's, llama.cpp's, KServe's or
that of Text Generation Inference."""

from __future__ import annotations

from http import HTTPStatus
from math import ceil

import msgspec
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import (
    ContextTooLong,
    EngineUnavailable,
    Forbidden,
    InvalidRequest,
    NotFound,
    NotSupported,
    Overloaded,
    PenstockError,
    RateLimited,
    Unauthorized,
)
from penstock.server.request_context import context_of

RETRY_AFTER = "1"  # seconds: about as long as an engine takes to restart
CLIENT_LEFT = Response(status_code=499)  # nobody reads it
ANTHROPIC_OVERLOADED = 529  # what Anthropic's clients expect for 503
STATUSES = {"request_timeout": 408, "request_too_large": 413, "uri_too_long": 414}  # of codes of InvalidRequest

OPENAI_TYPES = {403: "permission_error", 429: "rate_limit_error"}
TGI_TYPES = {429: "overloaded", 503: "overloaded"}
TGI_PATHS = ("/", "/generate_stream")
TGI_INVALID = 422  # what Text Generation Inference answers for 400
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
    if isinstance(error, RateLimited):
        return {"retry-after": str(ceil(error.retry_after)), "retry-after-ms": str(ceil(error.retry_after * 1000))}
    return {}


def body_of(error: PenstockError) -> bytes:
    kind = OPENAI_TYPES.get(status_of(error), "invalid_request_error" if status_of(error) < 500 else "server_error")
    param = error.param if isinstance(error, InvalidRequest) else None
    return msgspec.json.encode(OpenAiErrorBody(OpenAiErrorDetail(error.message, kind, param, error.code)))


def anthropic_body(error: PenstockError, status: int = 0, request_id: str | None = None) -> bytes:
    kind = ANTHROPIC_TYPES.get(_anthropic_status(status or status_of(error)), "invalid_request_error")
    return msgspec.json.encode(AnthropicErrorBody(AnthropicErrorDetail(kind, error.message), request_id))


def ollama_body(error: PenstockError) -> bytes:
    return msgspec.json.encode(OllamaErrorBody(error.message))


def kserve_body(error: PenstockError) -> bytes:
    return msgspec.json.encode(KserveErrorBody(error.message))


def tgi_body(error: PenstockError) -> bytes:
    kind = TGI_TYPES.get(status_of(error), "validation" if status_of(error) < 500 else "generation")
    return msgspec.json.encode(TgiErrorBody(error.message, kind))


def llamacpp_body(error: PenstockError, status: int = 0) -> bytes:
    status = status or status_of(error)
    detail = LlamaCppErrorDetail(status, error.message, LLAMACPP_TYPES.get(status, "invalid_request_error"))
    if isinstance(error, ContextTooLong):
        detail.type = "exceed_context_size_error"
        detail.message = f"the request exceeds the available context size: {error.message}"
        detail.n_prompt_tokens = UNSET if error.prompt_tokens is None else error.prompt_tokens
        detail.n_ctx = UNSET if error.context is None else error.context
    return msgspec.json.encode(LlamaCppErrorBody(detail))


def _anthropic_status(status: int) -> int:
    return ANTHROPIC_OVERLOADED if status == 503 else status


def error_shape(path: str) -> type[msgspec.Struct]:
    """Returns the error struct of the dialect that a path belongs to."""
    if path.startswith("/api/"):
        return OllamaErrorBody
    if path.startswith("/v2/models"):
        return KserveErrorBody
    if path in TGI_PATHS:
        return TgiErrorBody
    if path.startswith(LLAMACPP_PATHS):
        return LlamaCppErrorBody
    return AnthropicErrorBody if path.startswith("/v1/messages") else OpenAiErrorBody


def error_response(request: Request, error: PenstockError) -> Response:
    return respond(request, error, status_of(error), headers_of(error))


def respond(request: Request, error: PenstockError, status: int, headers: dict[str, str] | None = None) -> Response:
    """Returns the error in the request's dialect. The path decides; where two dialects share one, the header that
    Anthropic's clients always send does."""
    shape = error_shape(request.url.path)
    context_of(request.scope).outcome.error = error.code
    if shape is OllamaErrorBody:
        return _json(ollama_body(error), status, headers)
    if shape is KserveErrorBody:
        return _json(kserve_body(error), status, headers)
    if shape is TgiErrorBody:
        return _json(tgi_body(error), TGI_INVALID if status == 400 else status, headers)
    if shape is LlamaCppErrorBody:
        return _json(llamacpp_body(error, status), status, headers)
    if shape is AnthropicErrorBody or "anthropic-version" in request.headers:
        body = anthropic_body(error, status, context_of(request.scope).id)
        return _json(body, _anthropic_status(status), headers)
    return _json(body_of(error), status, headers)


def _json(body: bytes, status: int, headers: dict[str, str] | None) -> Response:
    return Response(body, status, headers, "application/json")


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


async def on_client_left(_: Request, __: Exception) -> Response:
    return CLIENT_LEFT

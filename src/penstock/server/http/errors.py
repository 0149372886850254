"""Answers with errors, in the shape of the request's dialect, or in OpenAI's where no dialect is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from math import ceil
from typing import NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from penstock.errors import (
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
from penstock.server.context.request_context import SHAPES, context_of

RETRY_AFTER = "1"  # seconds: about as long as an engine takes to restart
CLIENT_LEFT = Response(status_code=499)  # nobody reads it
OVERLOADED = 529  # some clients' status for 503
STATUSES = {
    "request_timeout": 408,
    "request_too_large": 413,
    "uri_too_long": 414,
}  # codes of InvalidRequest with a status other than 400

OPENAI_TYPES = {403: "permission_error", 429: "rate_limit_error"}


class OpenAiErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAiErrorBody(msgspec.Struct):
    error: OpenAiErrorDetail


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
            return {"connection": "close"}  # the rest of the body is not read
        case 503:
            return {"retry-after": RETRY_AFTER}
    if isinstance(error, PoisonedRequest):
        return {"x-should-retry": "false"}  # OpenAI's and Anthropic's clients send it again otherwise
    if isinstance(error, RateLimited):
        return {"retry-after": str(ceil(error.retry_after)), "retry-after-ms": str(ceil(error.retry_after * 1000))}
    return {}


class Refusal(NamedTuple):
    """Holds the facts for an error's body: the error, its HTTP status and the id of the request."""

    error: PenstockError
    status: int
    request_id: str


class ErrorShape(NamedTuple):
    """Says how a dialect writes errors."""

    body: type[msgspec.Struct]
    make: Callable[[Refusal], msgspec.Struct]
    statuses: Mapping[int, int] = {}  # ours: those that the dialect's clients expect
    lines: bool = False  # a stream is lines of JSON, not server-sent events

    def encode(self, error: PenstockError, status: int = 0, request_id: str = "") -> bytes:
        """Returns the error as JSON. `status` is the error's own unless it is given."""
        return msgspec.json.encode(self.make(Refusal(error, status or status_of(error), request_id)))


def _openai(refusal: Refusal) -> OpenAiErrorBody:
    error, status = refusal.error, status_of(refusal.error)
    kind = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.param if isinstance(error, InvalidRequest) else None
    return OpenAiErrorBody(OpenAiErrorDetail(error.message, kind, param, error.code))


OPENAI_ERRORS = ErrorShape(OpenAiErrorBody, _openai)


def shape_of(scope: Scope) -> ErrorShape:
    find: Callable[[Scope], ErrorShape] | None = scope.get(SHAPES)
    return OPENAI_ERRORS if find is None else find(scope)


def error_response(request: Request, error: PenstockError) -> Response:
    return respond(request, error, status_of(error), headers_of(error))


def respond(request: Request, error: PenstockError, status: int, headers: dict[str, str] | None = None) -> Response:
    context = context_of(request.scope)
    context.notes.outcome.fail(error)
    shape = shape_of(request.scope)
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
    """Refuses a request that needs a missing package."""
    assert isinstance(error, ModuleNotFoundError)
    return error_response(
        request,
        NotSupported(f"this needs the Python package {error.name!r}, which the server does not have: install it there"),
    )


async def on_client_left(_: Request, __: Exception) -> Response:
    return CLIENT_LEFT

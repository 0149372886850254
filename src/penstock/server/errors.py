"""Errors as HTTP sees them, in OpenAI's shape."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import EngineUnavailable, InvalidRequest, ModelNotFound, PenstockError

RETRY_AFTER = "1"  # seconds: an engine is back in about that
LEFT = Response(status_code=499)  # nobody reads it


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def status_of(error: PenstockError) -> int:
    match error:
        case InvalidRequest(code="request_too_large"):
            return 413
        case InvalidRequest():
            return 400
        case ModelNotFound():
            return 404
        case EngineUnavailable():
            return 503
    return 500


def body_of(error: PenstockError) -> bytes:
    kind = "server_error" if status_of(error) >= 500 else "invalid_request_error"
    param = error.param if isinstance(error, InvalidRequest) else None
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, param, error.code)))


async def answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    status = status_of(error)
    headers = {"retry-after": RETRY_AFTER} if status == 503 else None
    return Response(body_of(error), status, headers, "application/json")


async def answer_http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    told = InvalidRequest(
        f"{error.detail}: {request.method} {request.url.path}", code=HTTPStatus(error.status_code).name.lower()
    )
    return Response(body_of(told), error.status_code, error.headers, "application/json")


async def answer_bug(request: Request, _: Exception) -> Response:
    id = request.scope["request_id"]
    error = PenstockError(f"the server failed while it answered request {id}; its log has the details")
    error.code = "internal_error"
    headers = {"x-request-id": id, "connection": "close"}  # the HTTP server drops a connection whose handler failed
    return Response(body_of(error), 500, headers, "application/json")


async def answer_left(_: Request, __: Exception) -> Response:
    return LEFT

"""Writes errors as Anthropic does."""

from __future__ import annotations

import msgspec

from penstock.server.http.errors import OVERLOADED, ErrorShape, Refusal

ANTHROPIC_STATUSES = {503: OVERLOADED}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    error: AnthropicErrorDetail
    request_id: str | None = None


def write(refusal: Refusal) -> AnthropicErrorBody:
    status = ANTHROPIC_STATUSES.get(refusal.status, refusal.status)
    detail = AnthropicErrorDetail(ANTHROPIC_TYPES.get(status, "invalid_request_error"), refusal.error.message)
    return AnthropicErrorBody(detail, refusal.request_id or None)


ANTHROPIC_ERRORS = ErrorShape(AnthropicErrorBody, write, ANTHROPIC_STATUSES)

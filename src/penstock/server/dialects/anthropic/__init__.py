"""Implements Anthropic's messages."""

from __future__ import annotations

from penstock.server.dialects.anthropic.errors import ANTHROPIC_ERRORS
from penstock.server.http.endpoint import Dialect, RouteEntry

ROUTES = (
    RouteEntry("POST", "/v1/messages", ".messages:messages", ".messages:MESSAGES"),
    RouteEntry("POST", "/v1/messages/count_tokens", ".messages:count_tokens", ".messages:COUNT_TOKENS"),
)
DIALECT = Dialect(
    "anthropic",
    __name__,
    ROUTES,
    title="Anthropic",
    errors=ANTHROPIC_ERRORS,
    error_paths=("/v1/messages",),
    error_header="anthropic-version",
)

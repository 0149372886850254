"""Lists the routes of Anthropic's dialect."""

from __future__ import annotations

from penstock.server.dialects.anthropic.messages import COUNT_TOKENS, MESSAGES, count_tokens, messages
from penstock.server.http.endpoint import RouteEntry

ROUTES = (
    RouteEntry("POST", "/v1/messages", messages, MESSAGES),
    RouteEntry("POST", "/v1/messages/count_tokens", count_tokens, COUNT_TOKENS),
)

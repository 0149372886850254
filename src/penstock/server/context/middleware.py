"""Creates the context of each HTTP request, outside of all other middlewares."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.context.caller import Caller
from penstock.server.context.notes import AnswerNotes
from penstock.server.context.request_context import SHAPES, RequestContext, no_connection
from penstock.server.context.service import Service
from penstock.service_levels import ServiceTerms

if TYPE_CHECKING:
    from penstock.server.streams.kept import KeptStreams

EXPLAIN = "x-penstock-explain"
RESUME = "x-penstock-resume"  # asks to keep the stream when its client loses the connection
PARENT_HEADERS = ("traceparent", "tracestate")
CREDENTIALS = ("authorization", "x-api-key")
NO = ("", "0", "false", "no")
MAX_TENANT = 256  # characters of a tenant's name that count
MAX_PART = 32 * 2**10  # bytes of a body that are sent at once: the rest waits until the client reads
WRITE = "penstock.write"  # names `write` among the extensions of an HTTP server


class ContextMiddleware:
    """Creates each HTTP request's context, and adds the context's headers to the answer. It is the outermost
    middleware: `send` is the HTTP server's own here."""

    def __init__(
        self,
        app: ASGIApp,
        streams: KeptStreams,
        error_shape: Callable[[Scope], Any],
        *,
        lenient: bool,
        terms: ServiceTerms,
    ) -> None:
        self._app = app
        self._error_shape = error_shape
        self._streams = streams
        self._lenient = lenient
        self._terms = terms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        http = HttpRequest(scope)
        explain, resume = (http.headers.get(name, "").lower() not in NO for name in (EXPLAIN, RESUME))
        context = RequestContext(
            send=send,
            lenient=self._lenient,
            caller=Caller(owner=_owner(http, self._terms.tenant_header), tenants=bool(self._terms.tenant_header)),
            service=Service(terms=self._terms),
            notes=AnswerNotes(explain=explain),
        )
        context.write = scope.get("extensions", {}).get(WRITE, {}).get("call")
        context.parents = {name: http.headers[name] for name in PARENT_HEADERS if name in http.headers}
        context.streams = self._streams if resume and self._streams.limits.seconds else None
        scope.setdefault("state", {})["context"] = context
        scope[SHAPES] = self._error_shape

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *context.headers()]
            rest = memoryview(message.get("body", b""))
            while len(rest) > MAX_PART:
                await send({"type": "http.response.body", "body": rest[:MAX_PART], "more_body": True})
                rest = rest[MAX_PART:]
                message["body"] = rest
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            context.end()
            context.send, context.write = no_connection, None  # both lead back to the scope, and so to this context


def _owner(http: HttpRequest, tenant_header: str) -> str:
    """Returns who sent a request as far as that is known without keys: the tenant that a trusted proxy names in a
    header, or the address and the credentials, hashed."""
    if tenant_header and (tenant := http.headers.get(tenant_header)):
        return f"tenant {tenant[:MAX_TENANT]}"
    host = http.client.host if http.client else secrets.token_hex(8)
    given = [host, *(http.headers.get(name, "") for name in CREDENTIALS)]
    return blake2b("\n".join(given).encode(), digest_size=8).hexdigest()

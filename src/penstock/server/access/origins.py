"""Which web pages may use the server: its own, and those it was told of.

A browser sends what a page asks for to any server it can reach, a loopback one too, and only keeps the answer from the
page unless the server allows it. A key keeps strangers out, as a page cannot guess it; without keys, what comes from a
strange page is refused. To be called by the server's own name is not enough then: whoever owns a name can have it
lead here, so the name must be one that no stranger can own.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import ConfigError, Forbidden
from penstock.server.errors import told

METHODS = ("GET", "POST", "DELETE", "HEAD")
EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)
FOR_AN_HOUR = 3600  # a browser need not ask again


class Origins:
    def __init__(self, app: ASGIApp, allowed: tuple[str, ...], *, keyless: bool) -> None:
        check_origins(allowed)
        self._allowed = set(allowed)
        self._keyless = keyless
        self._app = _shared(app, allowed) if allowed else app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keyless and scope["type"] == "http" and (stranger := self._stranger(Request(scope))):
            error = Forbidden(f"pages of {stranger} may not use this server: start it with --cors {stranger}")
            return await told(Request(scope), error, 403)(scope, receive, send)
        await self._app(scope, receive, send)

    def _stranger(self, request: Request) -> str | None:
        origin = request.headers.get("origin")
        if origin is None or self._allowed & {origin, "*"}:
            return None
        host = request.headers.get("host", "")
        own = origin in (f"http://{host}", f"https://{host}")
        return None if own and _is_ours(re.sub(r":\d*$", "", host)) else origin


def _shared(app: ASGIApp, allowed: tuple[str, ...]) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=FOR_AN_HOUR,
    )


def check_origins(given: tuple[str, ...]) -> None:
    for origin in given:
        if origin == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", origin):
            continue
        raise ConfigError(f"{origin!r} is not an origin: write it as https://example.org or http://localhost:3000")


def _is_ours(host: str) -> bool:
    """An address, or a name that leads to this machine whoever is asked."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        named = socket.gethostname().lower()
        return host == "localhost" or host.endswith(".localhost") or host in (named, f"{named}.local")
    return True

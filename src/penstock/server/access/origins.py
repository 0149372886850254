"""Decides which web pages may use the server: its own page, and pages of the origins given with --cors.

A browser sends a page's requests to every server that it can reach, on loopback too. It only hides the answer from the
page unless the server allows it. With API keys that is enough: a page cannot guess a key. Without keys, requests from
pages of other origins are refused. A foreign page can also have the server's own origin: everyone can point a name of
their own to this machine (DNS rebinding), and browsers send no Origin with the page's reads. So without keys, the Host
header of every request must be an address, a name that nobody else can own, or a configured name. A name without a dot
belongs to the local network: a stranger cannot register one.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import ConfigError, Forbidden
from penstock.server.context.request_context import context_of
from penstock.server.http.errors import error_response

METHODS = ("GET", "POST", "DELETE", "HEAD")
EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "retry-after-ms",
    "x-penstock-ignored",
    "x-penstock-model",
    "x-penstock-route",
    "x-penstock-stream",
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)
MAX_HOST = 100  # characters of one in an error
PREFLIGHT_SECONDS = 3600  # browsers cache the answer


class Origins:
    """Refuses pages of other origins and requests for hosts of other names, unless there are keys."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...], hosts: tuple[str, ...] = (), *, keyless: bool) -> None:
        """Takes the allowed origins, and the names of the server; hosts of allowed origins are names, too."""
        check_origins(allowed)
        self._allowed = set(allowed)
        self._hosts = {host.lower() for host in hosts} | {_without_port(urlsplit(each).netloc) for each in allowed}
        self._any_host = "*" in {*allowed, *hosts}
        self._keyless = keyless
        self._app = _with_cors(app, allowed) if allowed else app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keyless and scope["type"] == "http" and (error := self._refusal(Request(scope))):
            return await error_response(Request(scope), error)(scope, receive, send)
        if self._keyless and scope["type"] == "http":
            context_of(scope).caller.page = self._foreign_page(Request(scope))
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> Forbidden | None:
        if origin := self._foreign(request):
            return Forbidden(f"pages of {origin} may not use this server: start it with --cors {origin} to allow them")
        for host in map(_without_port, request.headers.getlist("host")):
            if not self._is_ours(host):
                return Forbidden(
                    f"this server does not answer to the host {host[:MAX_HOST]!r}: use its address, or start it with "
                    "--allowed-host NAME"
                )
        return None

    def _is_ours(self, host: str) -> bool:
        return self._any_host or host in self._hosts or "." not in host or _is_own(host)

    def _foreign(self, request: Request) -> str | None:
        """Returns the request's origin if it is a page that may not use the server."""
        origin = request.headers.get("origin")
        return None if origin is None or self._may_use(origin, request) else origin

    def _may_use(self, origin: str, request: Request) -> bool:
        host = request.headers.get("host", "")
        own = origin in (f"http://{host}", f"https://{host}") and _is_own(_without_port(host))
        return own or bool(self._allowed & {origin, "*"})

    def _foreign_page(self, request: Request) -> str:
        """Describes the page that a browser sends a request without an Origin for: a GET of an image, a frame or a
        link. Empty: it may do more than read, because it is the server's own, an allowed one or no page. Browsers send
        Sec-Fetch-Site to loopback addresses and over TLS only, and old ones never; a page can have them send no
        Referer. So without both, no page is known to be the server's own."""
        headers = request.headers
        site, referer = headers.get("sec-fetch-site"), re.match(r"\w+://[^/?#]*", headers.get("referer", ""))
        if "origin" in headers or site in ("same-origin", "none") or "*" in self._allowed:
            return ""
        if referer is not None:
            origin = referer[0]
            return "" if self._may_use(origin, request) else f"this request is from a page of {origin[:MAX_HOST]}"
        if site is not None or headers.get("user-agent", "").startswith("Mozilla/"):
            return "this request is from a browser that does not say which page it is for"
        return ""


def _with_cors(app: ASGIApp, allowed: tuple[str, ...]) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_SECONDS,
    )


def check_origins(given: tuple[str, ...]) -> None:
    for origin in given:
        if origin == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+", origin):
            continue
        raise ConfigError(f"{origin!r} is not an origin: write it as https://example.org or http://localhost:3000")


def _without_port(host: str) -> str:
    return re.sub(r":\d*$", "", host).rstrip(".").lower()


def _is_own(host: str) -> bool:
    """True for an address, and for a name that always means this machine."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        name = socket.gethostname().lower()
        return host == "localhost" or host.endswith(".localhost") or host in (name, f"{name}.local")
    return True

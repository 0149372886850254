"""What a request may take of the server before anything is known of it, and all that stands before the application."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import InvalidRequest, Overloaded, PenstockError
from penstock.keys import Keyring, read
from penstock.server.access.accounts import Accounts
from penstock.server.access.authentication import READING, Authentication
from penstock.server.access.origins import Origins, check_origins
from penstock.server.bodies import MAX_BODY
from penstock.server.errors import headers_of, status_of, told
from penstock.server.served_model import ServedModel

MAX_URL = 8192  # bytes
BODY_SECONDS = 20.0  # that a body may take in any case; and besides, a second for every
BODY_RATE = 4096  # bytes of it
MAX_BODIES = 32 * MAX_BODY  # bytes of all requests under way, as far as they are kept in memory


class Rules(NamedTuple):
    """Whom a server lets in, how many at once, and how strict it is with what they send."""

    keys: Path | None = None  # a file of them; none: everyone
    origins: tuple[str, ...] = ()  # of pages that may use it beside its own
    max_waiting: int | None = None  # requests beyond those computed at once; None: in proportion to those
    lenient: bool = False  # fields that are not known are ignored, and listed in the answer


def check(rules: Rules, address: str) -> None:
    """Says at once what is wrong with the rules, and what is unwise about them at this address."""
    check_origins(rules.origins)
    if rules.keys is None:
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            _warn(
                f"whoever can reach {address} may use this server and change its models: `penstock keys add NAME` "
                "makes a key, and `penstock serve --keys FILE` asks for it"
            )
        return
    if not read(rules.keys):
        _warn(f"there is no key in {rules.keys}, so no one may use this server: `penstock keys add NAME` makes one")
    if os.name == "posix" and rules.keys.stat().st_mode & 0o077:
        _warn(f"others on this machine may read or change {rules.keys}: chmod 600 {rules.keys}")


def _warn(told: str) -> None:
    print(f"warning: {told}", file=sys.stderr, flush=True)


def guarded(app: ASGIApp, served: ServedModel, rules: Rules) -> ASGIApp:
    app = Guard(app, served)
    if rules.keys is not None:
        accounts = Accounts()
        served.metrics.register(accounts)
        app = Authentication(app, Keyring(rules.keys), accounts, served.name)
    return Origins(app, rules.origins, keyless=rules.keys is None)


class Guard:
    """Refuses what is too long, too slow or too much."""

    def __init__(self, app: ASGIApp, served: ServedModel) -> None:
        self._app = app
        self._served = served
        self._running = 0
        self._held = 0  # bytes of the bodies of those

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            _check_url(scope)
            self._check_line(scope)
        except PenstockError as error:
            return await told(Request(scope), error, status_of(error), headers_of(error))(scope, receive, send)
        counted = scope["method"] not in READING
        body = TimedBody(receive, self._hold)
        self._running += counted
        try:
            await self._app(scope, body, send)
        finally:
            self._running -= counted
            self._held -= body.size

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > MAX_BODIES:
            raise Overloaded(f"the bodies of all requests under way have {self._held} bytes: try again soon")

    def _check_line(self, scope: Scope) -> None:
        if scope["method"] not in READING and self._running >= self._served.places:
            raise Overloaded(f"{self._running} requests are under way, as many as may be here: try again soon")


def _check_url(scope: Scope) -> None:
    size = len(scope["raw_path"]) + len(scope["query_string"])
    if size > MAX_URL:
        raise InvalidRequest(f"the URL has {size} bytes; at most {MAX_URL} are taken", code="uri_too_long")


class TimedBody:
    """Receives a request's body, and gives up on one that comes too slowly."""

    def __init__(self, receive: Receive, hold: Callable[[int], None]) -> None:
        self.size = 0
        self._receive = receive
        self._hold = hold
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._whole = False

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise InvalidRequest(
                f"the body comes too slowly: it has {BODY_SECONDS:g} seconds and one more for every {BODY_RATE} bytes",
                code="request_timeout",
            ) from None
        size = len(message.get("body", b""))
        kept = min(size, MAX_BODY - self.size)  # no one keeps more: what is longer is refused, or goes to a file
        self.size += kept
        self._deadline += size / BODY_RATE
        self._whole = not message.get("more_body")
        self._hold(kept)
        return message

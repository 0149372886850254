"""Guards the application: limits the size, the speed and the number of requests."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import sys
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import InvalidRequest, PenstockError
from penstock.keys import read
from penstock.server.access.accounts import Accounts
from penstock.server.access.authentication import READING, Authentication
from penstock.server.access.in_flight import Admission, InFlight, requests_in_flight
from penstock.server.access.origins import Origins, check_origins
from penstock.server.bodies import MAX_BODY
from penstock.server.errors import error_response
from penstock.server.models import ModelPool
from penstock.server.request_context import context_of
from penstock.service_levels import STANDARD_TERMS, ServiceTerms

MAX_URL = 8192  # bytes
BODY_SECONDS = 20.0  # that any body may take, and one more second for every
BODY_RATE = 4096  # bytes of it
MAX_BODIES = 32 * MAX_BODY  # bytes of all bodies that are kept in memory at once


class Rules(NamedTuple):
    """Says who may use a server, how many requests it takes at once, and how strict it is about unknown fields."""

    keys: Path | None = None  # the key file; None: everyone may
    origins: tuple[str, ...] = ()  # of web pages that may use it, beside its own
    max_waiting: int | None = None  # requests beyond those computed at once; None: in proportion to those
    lenient: bool = True  # unknown fields and unsupported settings are ignored and listed; False: refused
    terms: ServiceTerms = STANDARD_TERMS  # by which engines are shared


def check(rules: Rules, address: str) -> None:
    """Raises if the rules are wrong, and warns about what is unsafe at this address."""
    check_origins(rules.origins)
    if rules.keys is None:
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            _warn(
                f"everyone who can reach {address} may use this server and change its models: make a key with "
                "`penstock keys add NAME` and require it with `penstock serve --keys FILE`"
            )
        return
    if not read(rules.keys):
        _warn(f"there is no key in {rules.keys}, so nobody may use this server: `penstock keys add NAME` makes one")
    if os.name == "posix" and rules.keys.stat().st_mode & 0o077:
        _warn(f"others on this machine may read or change {rules.keys}: chmod 600 {rules.keys}")


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def guarded(app: ASGIApp, pool: ModelPool, rules: Rules, accounts: Accounts | None) -> ASGIApp:
    """Returns the application behind the guard, authentication (if there are accounts) and the check of origins."""
    app = Guard(app, requests_in_flight(lambda: pool.rows, rules.max_waiting))
    if accounts is not None:
        pool.metrics.register(accounts)
        app = Authentication(app, accounts)
    return Origins(app, rules.origins, keyless=accounts is None)


class Guard:
    """Refuses a request whose URL is too long or whose body is too slow, and what exceeds a limit on everything in
    flight."""

    def __init__(self, app: ASGIApp, in_flight: InFlight) -> None:
        self._app = app
        self._in_flight = in_flight
        self._body_bytes = InFlight("bytes of request bodies", lambda: MAX_BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        context = context_of(scope)
        admission = context.admission = Admission(self._in_flight)
        try:
            _check_url(scope)
            context.read_headers(Request(scope).headers)
            if scope["method"] not in READING:
                admission.open()
        except PenstockError as error:
            return await error_response(Request(scope), error)(scope, receive, send)
        body = TimedBody(receive, self._body_bytes)
        try:
            await self._app(scope, body, send)
        finally:
            admission.close()
            self._body_bytes.release(body.size)


def _check_url(scope: Scope) -> None:
    size = len(scope["raw_path"]) + len(scope["query_string"])
    if size > MAX_URL:
        raise InvalidRequest(f"the URL has {size} bytes; the limit is {MAX_URL}: shorten it", code="uri_too_long")


class TimedBody:
    """Receives a request's body; raises if it arrives too slowly, or if all bodies together are too large."""

    def __init__(self, receive: Receive, in_flight: InFlight) -> None:
        self.size = 0  # bytes that count as in flight
        self._receive = receive
        self._in_flight = in_flight
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise InvalidRequest(
                f"the body arrives too slowly: it has {BODY_SECONDS:g} seconds and one more for every {BODY_RATE} "
                "bytes; send it faster",
                code="request_timeout",
            ) from None
        size = len(message.get("body", b""))
        kept = min(size, MAX_BODY - self.size)  # nobody keeps more: what is longer is refused, or goes to a file
        self._deadline += size / BODY_RATE
        self._complete = not message.get("more_body")
        self._in_flight.take(kept)
        self.size += kept
        return message

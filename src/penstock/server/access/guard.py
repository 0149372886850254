"""Guards the application: limits the size, the speed and the number of requests.

A request takes its place among those in flight when its body is whole, so that a client that sends slowly holds none.
Bodies that are not whole have a limit of their own. What exceeds it costs the oldest of them, not the newest: a body
takes milliseconds to arrive unless its client is slow on purpose."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config import log_to_stderr
from penstock.errors import InvalidRequest, PenstockError
from penstock.keys import read
from penstock.server.access.accounts import Accounts
from penstock.server.access.authentication import READING, Authentication, ends_work
from penstock.server.access.in_flight import Admission, InFlight, requests_in_flight
from penstock.server.access.origins import Origins, check_origins
from penstock.server.context.request_context import context_of
from penstock.server.http.bodies import MAX_BODY
from penstock.server.http.errors import error_response
from penstock.server.models.pool import ModelPool
from penstock.service_levels import STANDARD_TERMS, ServiceTerms

MAX_URL = 8192  # bytes
BODY_SECONDS = 20.0  # allowed for any body, and one more second for every
BODY_RATE = 4096  # bytes of it
MAX_BODIES = 32 * MAX_BODY  # bytes of all bodies that are kept in memory at once
MAX_ARRIVING = 1024  # bodies that are not whole yet


class Rules(NamedTuple):
    """Says who may use a server, how many requests it takes at once, and how strict it is about unknown fields."""

    keys: Path | None = None  # the key file; None: everyone may
    origins: tuple[str, ...] = ()  # allowed web pages, in addition to its own
    max_waiting: int | None = None  # requests beyond those computed at once; None: in proportion to those
    hosts: tuple[str, ...] = ()  # further names that the Host header may have; only without keys
    lenient: bool = True  # unknown fields and unsupported settings are ignored and listed; False: refused
    terms: ServiceTerms = STANDARD_TERMS  # default targets and limits of requests


def check(rules: Rules, address: str) -> None:
    """Raises if the rules are wrong, and warns about unsafe ones at this address."""
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
    log_to_stderr(f"warning: {message}", "warning")


def guarded(app: ASGIApp, pool: ModelPool, rules: Rules, accounts: Accounts | None) -> ASGIApp:
    """Returns the application behind the guard, authentication (if there are accounts) and the check of origins."""
    app = Guard(app, requests_in_flight(lambda: pool.models.rows, rules.max_waiting))
    if accounts is not None:
        pool.metrics.register(accounts)
        app = Authentication(app, accounts)
    return Origins(app, rules.origins, rules.hosts, keyless=accounts is None)


class Guard:
    """Refuses a request whose URL is too long or whose body is too slow, and what exceeds a limit on everything in
    flight."""

    def __init__(self, app: ASGIApp, in_flight: InFlight) -> None:
        self._app = app
        self._in_flight = in_flight
        self._bodies = ArrivingBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        context = context_of(scope)
        admission = context.admission = Admission(self._in_flight)
        try:
            _check_url(scope)
            context.service.read_headers(Request(scope).headers)
            if takes_place := scope["method"] not in READING and not ends_work(scope):
                self._in_flight.check()  # refused at once, before its body comes
        except PenstockError as error:
            return await error_response(Request(scope), error)(scope, receive, send)
        body = TimedBody(receive, self._bodies, admission.open if takes_place else None)
        try:
            await self._app(scope, body, send)
        finally:
            admission.close()
            body.close()


def _check_url(scope: Scope) -> None:
    size = len(scope["raw_path"]) + len(scope["query_string"])
    if size > MAX_URL:
        raise InvalidRequest(f"the URL has {size} bytes; the limit is {MAX_URL}: shorten it", code="uri_too_long")


class ArrivingBodies:
    """Counts the bytes of all bodies in memory, and knows which of them are not whole yet."""

    def __init__(self) -> None:
        self.bytes = InFlight("bytes of request bodies", lambda: MAX_BODIES)
        self._partial: dict[TimedBody, None] = {}  # the oldest first

    def begin(self, body: TimedBody) -> None:
        """Counts a body as not whole. One too many costs the oldest."""
        self._partial[body] = None
        if len(self._partial) > MAX_ARRIVING:
            self._give_up_oldest()

    def end(self, body: TimedBody) -> None:
        self._partial.pop(body, None)

    def take(self, count: int, body: TimedBody) -> None:
        """Counts bytes of a body; raises Overloaded if they do not fit, even after all incomplete bodies are given
        up."""
        while self.bytes.full(count) and next(iter(self._partial), body) is not body:
            self._give_up_oldest()
        self.bytes.take(count)

    def _give_up_oldest(self) -> None:
        next(iter(self._partial)).give_up()


class TimedBody:
    """Receives a request's body; raises if it arrives too slowly, or if all bodies together are too large. Calls
    `on_whole` when it is whole."""

    def __init__(self, receive: Receive, bodies: ArrivingBodies, on_whole: Callable[[], None] | None) -> None:
        self._receive = receive
        self._bodies = bodies
        self._on_whole = on_whole
        self._size = 0  # bytes that count as in memory
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._timeout: asyncio.Timeout | None = None  # while it is waited for
        self._begun = self._whole = self._given_up = False

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        if not self._begun:
            self._begun = True
            self._bodies.begin(self)
        try:
            async with asyncio.timeout_at(self._deadline) as self._timeout:
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow() from None
        self._count(len(message.get("body", b"")))
        if not message.get("more_body"):
            self._whole = True
            self._bodies.end(self)
            if self._on_whole is not None and message["type"] == "http.request":
                self._on_whole()
        return message

    def _count(self, size: int) -> None:
        self._deadline += size / BODY_RATE
        kept = min(size, MAX_BODY - self._size)  # longer bodies are refused, or go to a file
        self._bodies.take(kept, self)
        self._size += kept

    def give_up(self) -> None:
        """Frees its bytes and refuses the request that waits for it."""
        self._given_up, self._deadline = True, 0.0
        if self._timeout is not None:
            self._timeout.reschedule(self._deadline)
        self.close()

    def close(self) -> None:
        self._bodies.end(self)
        self._bodies.bytes.release(self._size)
        self._size = 0

    def _too_slow(self) -> InvalidRequest:
        limit = f"it has {BODY_SECONDS:g} seconds and one more for every {BODY_RATE} bytes"
        if self._given_up:
            limit = f"others arrive, and {MAX_ARRIVING} of {MAX_BODIES} bytes together may do so at once"
        return InvalidRequest(f"the body arrives too slowly: {limit}; send it faster", code="request_timeout")

"""Authenticates requests by API key: every route needs one, except the page and the health probes that only read."""

from __future__ import annotations

import re

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError, Unauthorized
from penstock.keys import Key
from penstock.server.access.accounts import Account, Accounts
from penstock.server.context.request_context import context_of
from penstock.server.http.errors import error_response

PROBES = ("/health", "/v1/health", "/ping", "/v2/health/live", "/v2/health/ready")  # monitoring polls these
OPEN = {*PROBES, "/"}  # GET and HEAD need no key: the page holds no data and asks for the key itself
READING = {"GET", "HEAD"}
ENDING = re.compile("DELETE /v1/(streams|responses)/[^/]+|POST /v1/(responses|batches)/[^/]+/cancel")


class Authentication:
    """Rejects requests without a valid key and requests over their key's limits. It reports the limits in headers, so
    it adds no cost to a stream."""

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if _is_open(scope) and not self._known(scope):
            context_of(scope).caller.anonymous = True
            return await self._app(scope, receive, send)
        account = None
        try:
            account = self._accounts.of(self._key(scope))
            _admit(account, scope)
        except PenstockError as error:
            answer = error_response(Request(scope), error)
            return await answer(scope, receive, _with_headers(send, account))
        context_of(scope).caller.charge_to(account)
        with account:
            await self._app(scope, receive, _with_headers(send, account))

    def _known(self, scope: Scope) -> bool:
        key = self._accounts.keyring.find(_given(scope))
        return key is not None and not key.expired()

    def _key(self, scope: Scope) -> Key:
        given = _given(scope)
        key = self._accounts.keyring.find(given)
        if key is not None and not key.expired():
            return key
        self._accounts.unauthorized += 1
        if key is not None:
            raise Unauthorized(f"the API key {key.name!r} expired on {key.expires}: ask for another")
        if given:
            raise Unauthorized("the API key is not one of this server's: check it, or ask for one")
        raise Unauthorized("this server needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")


def _is_open(scope: Scope) -> bool:
    """Returns whether a request needs no key."""
    return scope["path"] in OPEN and scope["method"] in READING and not wants_generation(scope)


def wants_generation(scope: Scope) -> bool:
    """Returns whether a health probe asks that engines generate a token."""
    return QueryParams(scope["query_string"]).get("generate", "0").lower() not in ("0", "false", "")


def _admit(account: Account, scope: Scope) -> None:
    """Checks limits. Requests that only read are not limited: they need no engine, and clients that poll an answer
    send many. Nor are those that end work: a key at its limits needs them most."""
    if scope["method"] not in READING and not ends_work(scope):
        account.begin()


def ends_work(scope: Scope) -> bool:
    """Returns whether a request only ends what another has begun."""
    return ENDING.fullmatch(f"{scope['method']} {scope['path']}") is not None


def _given(scope: Scope) -> list[bytes]:
    found = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            found.append(value)
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip())
    return [each for each in found if each][:2]


def _with_headers(send: Send, account: Account | None) -> Send:
    async def send_with_limits(message: Message) -> None:
        if account is not None and message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *account.headers()]
        await send(message)

    return send_with_limits

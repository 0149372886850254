"""Who may come in: a key on every route but those that hold nothing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import Forbidden, PenstockError, Unauthorized
from penstock.keys import Key, Keyring
from penstock.server.access.accounts import ACCOUNT, Account, Accounts
from penstock.server.errors import headers_of, status_of, told

OPEN = {"/health", "/"}  # to those who read: the second is the page, which holds no data and asks for the key
READING = {"GET", "HEAD"}
CHANGING = ("/api/pull", "/api/create", "/api/copy", "/api/delete", "/api/push", "/api/blobs/")


class Authentication:
    """Costs a stream nothing while it runs: what it adds to an answer is in its headers."""

    def __init__(self, app: ASGIApp, keyring: Keyring, accounts: Accounts, model: str) -> None:
        self._app = app
        self._keyring = keyring
        self._accounts = accounts
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] in OPEN and scope["method"] in READING):
            return await self._app(scope, receive, send)
        account = None
        try:
            account = self._accounts.of(self._key(scope))
            self._admit(account, scope)
        except PenstockError as error:
            answer = told(Request(scope), error, status_of(error), headers_of(error))
            return await answer(scope, receive, _with_headers(send, account))
        ACCOUNT.set(account)
        with account:
            await self._app(scope, receive, _with_headers(send, account))

    def _key(self, scope: Scope) -> Key:
        given = _given(scope)
        key = self._keyring.find(given)
        if key is not None and not key.expired():
            return key
        self._accounts.strangers += 1
        if key is not None:
            raise Unauthorized(f"the key {key.name!r} expired on {key.expires}: ask for another")
        if given:
            raise Unauthorized("the API key is not one of this server's: check it, or ask for one")
        raise Unauthorized("this server needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")

    def _admit(self, account: Account, scope: Scope) -> None:
        """Reading is free: it asks nothing of the engine, and whoever watches an answer does it often."""
        key, path = account.key, scope["path"]
        if key.models and self._model not in key.models:
            raise _forbidden(account, "model", f"use {self._model!r}, only {', '.join(key.models)}")
        if scope["method"] in READING:
            return
        if path.startswith(CHANGING) and not key.admin:
            raise _forbidden(account, "admin", f"{scope['method']} {path}: it takes a key made with --admin")
        account.begin()


def _given(scope: Scope) -> list[bytes]:
    found = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            found.append(value)
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip())
    return [each for each in found if each][:2]


def _forbidden(account: Account, reason: str, told: str) -> Forbidden:
    account.refused[reason] += 1
    return Forbidden(f"the key {account.key.name!r} may not {told}")


def _with_headers(send: Send, account: Account | None) -> Send:
    async def send_told(message: Message) -> None:
        if account is not None and message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *account.headers()]
        await send(message)

    return send_told

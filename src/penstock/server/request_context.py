"""What is noted about a request while it is read, to be told in its answer."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from hashlib import blake2b

from starlette.requests import Request as HttpRequest

from penstock.errors import InvalidRequest
from penstock.server.access.accounts import ACCOUNT

EXPLAIN = "x-penstock-explain"
CREDENTIALS = ("authorization", "x-api-key")
MOST = 256  # fields that are ignored
NO = ("", "0", "false", "no")


class Notes:
    def __init__(self, *, lenient: bool = False, explain: bool = False, owner: str = "") -> None:
        self.lenient = lenient  # what is not known is ignored, and told
        self.explain = explain
        self.owner = owner  # whose recent prompts an explanation may speak of
        self.ignored: set[str] = set()  # fields
        self.truncated = 0  # tokens of the prompt

    def ignore(self, field: str) -> None:
        """Once, in however many messages or tools it stands."""
        self.ignored.add(re.sub(r"\[\d+\]", "[]", field))
        if len(self.ignored) > MOST:
            raise InvalidRequest(f"the request has more than {MOST} unknown fields: remove them", param=field)


_NOTES: ContextVar[Notes] = ContextVar("notes")


def begin_notes(http: HttpRequest, *, lenient: bool) -> None:
    explain = http.headers.get(EXPLAIN, "").lower() not in NO
    _NOTES.set(Notes(lenient=lenient, explain=explain, owner=_owner(http)))


def notes() -> Notes:
    """Of the request that is being answered."""
    if (found := _NOTES.get(None)) is None:
        found = Notes()
        _NOTES.set(found)
    return found


def _owner(http: HttpRequest) -> str:
    """Who asks, as far as can be known: the key's owner, or else from where, and with which credentials. A request of
    our own for no key is nobody's."""
    if (account := ACCOUNT.get()) is not None:
        return f"key {account.key.name}"
    if http.client is None:
        return secrets.token_hex(8)
    given = [http.client.host, *(http.headers.get(name, "") for name in CREDENTIALS)]
    return blake2b("\n".join(given).encode(), digest_size=8).hexdigest()

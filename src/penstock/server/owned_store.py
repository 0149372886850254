"""Keeps what clients ask to store, in memory, with limits on its number and size.

Everything belongs to an owner and exists for that one alone. What was least recently used is dropped first. What is
still being made is not dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from penstock.errors import NotFound

MAX_KEPT = 1024
MAX_BYTES = 64 * 2**20  # as JSON


class StoredAnswer(Protocol):
    """Is an answer that can be stored."""

    @property
    def id(self) -> str:
        """Returns the name that its client knows it by."""

    @property
    def tenant(self) -> str | None:
        """Returns whose it is: see RequestContext.owner_name."""

    @property
    def running(self) -> bool:
        """Returns whether it is still being made."""

    @property
    def size(self) -> int:
        """Returns its bytes as JSON."""


S = TypeVar("S", bound=StoredAnswer)


class OwnedStore(Generic[S]):
    """Holds answers of one kind, which errors call by that name."""

    def __init__(self, kind: str, most: int = MAX_KEPT, max_bytes: int = MAX_BYTES) -> None:
        self._kind = kind
        self._most = most
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str | None, str], tuple[S, int]] = OrderedDict()  # with sizes; last used last
        self._bytes = 0

    def put(self, stored: S) -> None:
        """Stores an answer, or its current state if it is stored already."""
        place = (stored.tenant, stored.id)
        self._drop(place)
        self._stored[place] = stored, stored.size
        self._bytes += self._stored[place][1]
        self._make_room(stored)

    def get(self, id: str, tenant: str | None) -> S:
        """Returns a tenant's answer; raises NotFound if there is none, or if it is another's."""
        if (tenant, id) not in self._stored:
            reasons = "it was not stored, was deleted, or was dropped for newer ones"
            raise NotFound(f"there is no {self._kind} {id[:100]!r} here: {reasons}")
        self._stored.move_to_end((tenant, id))
        return self._stored[tenant, id][0]

    def remove(self, id: str, tenant: str | None) -> None:
        """Deletes a tenant's answer; raises NotFound as `get` does."""
        self.get(id, tenant)
        self._drop((tenant, id))

    def of(self, tenant: str | None) -> list[S]:
        """Returns all of a tenant's answers. Looking at them does not count as using them."""
        return [stored for (whose, _), (stored, _) in self._stored.items() if whose == tenant]

    def _make_room(self, newest: S) -> None:
        for place, (stored, _) in list(self._stored.items()):
            if len(self._stored) <= self._most and self._bytes <= self._max_bytes:
                return
            if stored is not newest and not stored.running:
                self._drop(place)

    def _drop(self, place: tuple[str | None, str]) -> None:
        if place in self._stored:
            self._bytes -= self._stored.pop(place)[1]

"""Keeps what clients ask to store, in memory and, if the server is told so, on disk too, with limits on its number and
size.

Everything belongs to an owner and exists for that one alone. What was least recently used is dropped first. What is
still being made is not dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from penstock.errors import NotFound
from penstock.server.lasting_answers import LastingAnswers

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
    """Holds answers of one kind, which errors call by that name. Those that are complete outlive the server if they are
    to be `lasting`."""

    def __init__(
        self,
        kind: str,
        most: int = MAX_KEPT,
        max_bytes: int = MAX_BYTES,
        lasting: LastingAnswers[S] | None = None,
    ) -> None:
        self._kind = kind
        self._lasting = lasting
        self._most = most
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str | None, str], tuple[S, int]] = OrderedDict()  # with sizes; last used last
        self._bytes = 0

    async def open(self) -> None:
        """Takes in what earlier servers have left on disk. Limits may have become smaller since."""
        if self._lasting is not None:
            for stored in await self._lasting.load():
                self._keep(stored)

    async def close(self) -> None:
        """Returns when everything is on disk that is to be there."""
        if self._lasting is not None:
            await self._lasting.close()

    def put(self, stored: S) -> None:
        """Stores an answer, or its current state if it is stored already."""
        if self._lasting is not None and not stored.running:
            self._lasting.save(stored)
        self._keep(stored)

    def get(self, id: str, tenant: str | None) -> S:
        """Returns a tenant's answer; raises NotFound if there is none, or if it is another's."""
        if (tenant, id) not in self._stored:
            gone = "" if self._lasting else ", or was stored before this server started (see --keep-answers)"
            reasons = f"it was not stored, was deleted, was dropped for newer ones{gone}"
            raise NotFound(f"there is no {self._kind} {id[:100]!r} here: {reasons}")
        self._stored.move_to_end((tenant, id))
        return self._stored[tenant, id][0]

    def remove(self, id: str, tenant: str | None) -> None:
        """Deletes a tenant's answer; raises NotFound as `get` does."""
        self.get(id, tenant)
        self._drop(id, tenant)

    def of(self, tenant: str | None) -> list[S]:
        """Returns all of a tenant's answers. Looking at them does not count as using them."""
        return [stored for (whose, _), (stored, _) in self._stored.items() if whose == tenant]

    def _keep(self, stored: S) -> None:
        place, size = (stored.tenant, stored.id), stored.size
        self._bytes += size - self._stored.pop(place, (stored, 0))[1]
        self._stored[place] = stored, size
        self._make_room(stored)

    def _make_room(self, newest: S) -> None:
        for stored, _ in list(self._stored.values()):
            if len(self._stored) <= self._most and self._bytes <= self._max_bytes:
                return
            if stored is not newest and not stored.running:
                self._drop(stored.id, stored.tenant)

    def _drop(self, id: str, tenant: str | None) -> None:
        self._bytes -= self._stored.pop((tenant, id))[1]
        if self._lasting is not None:
            self._lasting.drop(id, tenant)

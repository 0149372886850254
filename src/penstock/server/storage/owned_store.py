"""Stores answers for clients, in memory and with --keep-answers on disk too, with limits on their number and size.

Only its owner can find an answer. Each owner has limits, and all together have limits. An owner who exceeds its own
loses its least recently used answers. If all together exceed theirs, the owner with the most does: so nobody drops the
answers of an owner who has less. Unfinished answers are not dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from penstock.errors import NotFound
from penstock.server.storage.lasting_answers import LastingAnswers

MAX_KEPT = 1024  # per owner
MAX_BYTES = 64 * 2**20  # per owner, as JSON
FULL_OWNERS = 8  # the limit of all owners together is this many times the limit of one


class StoredAnswer(Protocol):
    """Is an answer that can be stored."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str | None:
        """Returns whose it is: see RequestContext.owner_name."""

    @property
    def running(self) -> bool: ...

    @property
    def size(self) -> int:
        """Returns its bytes as JSON."""


S = TypeVar("S", bound=StoredAnswer)


class _Shelf(Generic[S]):
    """Holds the answers of one owner."""

    def __init__(self) -> None:
        self.answers: OrderedDict[str, tuple[S, int]] = OrderedDict()  # id -> answer and size; last used last
        self.bytes = 0

    def put(self, stored: S) -> None:
        size = stored.size
        self.bytes += size - self.answers.pop(stored.id, (stored, 0))[1]
        self.answers[stored.id] = stored, size

    def remove(self, id: str) -> None:
        self.bytes -= self.answers.pop(id)[1]

    def oldest(self, newest: S) -> S | None:
        """Returns the least recently used answer that may be dropped for the newest; None if there is none."""
        answers = (stored for stored, _ in self.answers.values())
        return next((stored for stored in answers if stored is not newest and not stored.running), None)


class OwnedStore(Generic[S]):
    """Holds answers of one kind, which errors call by that name. They outlive the server if `lasting` is given."""

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
        self._shelves: dict[str | None, _Shelf[S]] = {}  # owner -> answers

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
        if self._lasting is not None:
            self._lasting.save(stored)
        self._keep(stored)

    async def written(self) -> None:
        """Returns when everything that is stored by now is on disk, if it is to be there."""
        if self._lasting is not None:
            await self._lasting.written()

    def get(self, id: str, tenant: str | None) -> S:
        """Returns a tenant's answer; raises NotFound if there is none, or if it is another's."""
        shelf = self._shelves.get(tenant)
        if shelf is None or id not in shelf.answers:
            gone = "" if self._lasting else ", or was stored before this server started (see --keep-answers)"
            reasons = f"it was not stored, was deleted, was dropped for newer ones{gone}"
            raise NotFound(f"there is no {self._kind} {id[:100]!r} here: {reasons}")
        shelf.answers.move_to_end(id)
        return shelf.answers[id][0]

    def remove(self, id: str, tenant: str | None) -> None:
        """Deletes a tenant's answer; raises NotFound as `get` does."""
        self._drop(self.get(id, tenant))

    def of(self, tenant: str | None) -> list[S]:
        """Returns all of a tenant's answers. Looking at them does not count as using them."""
        shelf = self._shelves.get(tenant)
        return [] if shelf is None else [stored for stored, _ in shelf.answers.values()]

    def _keep(self, stored: S) -> None:
        shelf = self._shelves.setdefault(stored.tenant, _Shelf())
        shelf.put(stored)
        while self._fullness([shelf]) > 1 and (oldest := shelf.oldest(stored)) is not None:
            self._drop(oldest)
        while self._fullness(self._shelves.values()) > FULL_OWNERS and (oldest := self._oldest(stored)) is not None:
            self._drop(oldest)

    def _fullness(self, shelves: Collection[_Shelf[S]]) -> float:
        """Returns how many times the limits of one owner are used."""
        count = sum(len(shelf.answers) for shelf in shelves)
        return max(count / self._most, sum(shelf.bytes for shelf in shelves) / self._max_bytes)

    def _oldest(self, newest: S) -> S | None:
        """Returns the least recently used answer of the owner with the most."""
        fullest = sorted(self._shelves.values(), key=lambda shelf: self._fullness([shelf]), reverse=True)
        return next((oldest for shelf in fullest if (oldest := shelf.oldest(newest)) is not None), None)

    def _drop(self, stored: S) -> None:
        self._shelves[stored.tenant].remove(stored.id)
        if not self._shelves[stored.tenant].answers:
            del self._shelves[stored.tenant]
        if self._lasting is not None:
            self._lasting.drop(stored.id, stored.tenant)

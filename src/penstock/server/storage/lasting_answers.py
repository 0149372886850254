"""Keeps stored answers on disk, so that they outlive their server: --keep-answers.

Memory answers every query. Changes are written to disk later, in the same order, and are read once, when a server
starts. A process that is killed loses the writes of its last moments at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from sqlite3 import Connection
from typing import Generic, NamedTuple, TypeVar

import msgspec

from penstock.errors import PenstockError
from penstock.server.batch.archive import Archive

log = logging.getLogger(__name__)


class AnswerRecord(NamedTuple):
    """Is an answer as it is kept on disk."""

    id: str
    tenant: str | None
    body: bytes  # JSON


S = TypeVar("S")


class LastingAnswers(Generic[S]):
    """Keeps the answers of one `kind` in an archive. `write` makes a record of an answer, and `read` an answer of a
    record."""

    def __init__(
        self, archive: Archive, kind: str, write: Callable[[S], AnswerRecord], read: Callable[[AnswerRecord], S]
    ) -> None:
        self._archive = archive
        self._kind = kind
        self._write, self._read = write, read
        self._writing: set[asyncio.Task[None]] = set()
        self._logged = ""  # the last failure, until a write succeeds

    async def load(self) -> list[S]:
        """Returns the answers that earlier servers have kept, oldest first. Records in another version's form are
        skipped and stay on disk."""
        answers, unread = list[S](), list[str]()
        for record in await self._archive.do(load, self._kind):
            try:
                answers.append(self._read(record))
            except msgspec.MsgspecError as error:
                unread.append(f"{record.id} ({error})")
        if unread:
            log.warning("%d stored answers cannot be read, the first being %s", len(unread), unread[0])
        return answers

    def save(self, answer: S) -> None:
        self._begin(save, self._kind, self._write(answer))

    def drop(self, id: str, tenant: str | None) -> None:
        self._begin(drop, self._kind, id, tenant)

    async def written(self) -> None:
        """Returns when everything that was begun by now is written."""
        if self._writing:
            await asyncio.wait(set(self._writing))

    async def close(self) -> None:
        while self._writing:
            await asyncio.wait(self._writing)

    def _begin(self, work: Callable[..., None], *args: object) -> None:
        task = asyncio.create_task(self._do(work, *args))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _do(self, work: Callable[..., None], *args: object) -> None:
        try:
            await self._archive.do(work, *args)
            self._logged = ""
        except PenstockError as error:
            if error.message != self._logged:
                log.warning("stored answers are kept in memory alone: %s", error.message)
            self._logged = error.message


# -- transactions of the archive -------------------------------------------------------------------------------------

PLACE = "kind = ? AND id = ? AND tenant IS ?"  # clients may choose ids, so that owners have the same ones


def save(db: Connection, kind: str, record: AnswerRecord) -> None:
    body, place = record.body, (kind, record.id, record.tenant)
    if not db.execute(f"UPDATE answers SET body = ? WHERE {PLACE}", (body, *place)).rowcount:
        db.execute("INSERT INTO answers (kind, id, tenant, body) VALUES (?, ?, ?, ?)", (*place, body))


def drop(db: Connection, kind: str, id: str, tenant: str | None) -> None:
    db.execute(f"DELETE FROM answers WHERE {PLACE}", (kind, id, tenant))


def load(db: Connection, kind: str) -> Sequence[AnswerRecord]:
    rows = db.execute("SELECT id, tenant, body FROM answers WHERE kind = ? ORDER BY number", (kind,))
    return [AnswerRecord(*row) for row in rows]

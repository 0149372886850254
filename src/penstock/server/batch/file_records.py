"""Reads and writes the records of files. Each function is a transaction of the archive, or part of one.

A tenant is the name of an API key or a name from a trusted proxy, and finds only its own files and batches. None finds
all: the server has no tenants, or asks for itself.
"""

from __future__ import annotations

import time
from sqlite3 import Connection
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest
from penstock.server.access.in_flight import owner_limit
from penstock.server.batch.archive import Space

DAY = 86_400
COLUMNS = "id, bytes, created_at, filename, purpose, expires_at"

Order = Literal["asc", "desc"]


class FileRecord(msgspec.Struct, kw_only=True):
    """Describes a file, in the shape that clients get."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=30 * DAY)]


class ListPage(NamedTuple):
    after: str | None = None  # the last id of the page before
    limit: int = 20
    order: Order = "desc"


OWN = "(? IS NULL OR {} = ?)"  # a condition that selects a tenant's own rows


class FileRoom(NamedTuple):
    """Gives a tenant's usage and limit: half of the space that others leave."""

    bytes: int
    files: int
    most_bytes: int
    most_files: int

    def check(self, bytes: int, files: int = 1) -> None:
        """Raises if `bytes` and `files` more do not fit."""
        if self.bytes + bytes > self.most_bytes:
            raise InvalidRequest(
                f"your files would have {self.bytes + bytes} bytes; the limit is {self.most_bytes}: delete some",
                code="storage_full",
            )
        if self.files + files > self.most_files:
            raise InvalidRequest(
                f"you would have {self.files + files} files; the limit is {self.most_files}: delete some",
                code="storage_full",
            )


def room(db: Connection, tenant: str | None, space: Space) -> FileRoom:
    (bytes, files), (all_bytes, all_files) = usage(db, tenant), usage(db)
    most_bytes = owner_limit(tenant, space.total_bytes, all_bytes - bytes)
    return FileRoom(bytes, files, most_bytes, owner_limit(tenant, space.files, all_files - files))


def usage(db: Connection, tenant: str | None = None) -> tuple[int, int]:
    sql = f"SELECT COALESCE(SUM(bytes), 0), COUNT(*) FROM files WHERE {OWN.format('tenant')}"
    bytes, count = db.execute(sql, (tenant, tenant)).fetchone()
    return bytes, count


def add(db: Connection, file: FileRecord, tenant: str | None, space: Space | None = None) -> None:
    """Adds a tenant's file; raises if that exceeds the limits of `space`. A batch's output has none."""
    if space is not None:
        room(db, tenant, space).check(file.bytes)
    values = (file.id, file.bytes, file.created_at, file.filename, file.purpose, file.expires_at, tenant)
    db.execute(f"INSERT INTO files ({COLUMNS}, tenant) VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def find(db: Connection, id: str, tenant: str | None) -> FileRecord | None:
    where = f"id = ? AND (expires_at IS NULL OR expires_at > ?) AND {OWN.format('tenant')}"
    row = db.execute(f"SELECT {COLUMNS} FROM files WHERE {where}", (id, time.time(), tenant, tenant)).fetchone()
    return None if row is None else _file(row)


def listed(db: Connection, page: ListPage, purpose: str | None, tenant: str | None) -> list[FileRecord]:
    """Returns a page, and one more than its limit if there are more."""
    where = f"(expires_at IS NULL OR expires_at > ?) AND (? IS NULL OR purpose = ?) AND {OWN.format('tenant')}"
    values = (time.time(), purpose, purpose, tenant, tenant)
    return [_file(row) for row in rows_of(db, "files", COLUMNS, page, where, values)]


def rows_of(
    db: Connection, table: str, columns: str, page: ListPage, where: str = "TRUE", values: tuple[object, ...] = ()
) -> list[tuple[Any, ...]]:
    """Returns a page of a table in the order its rows were added, and one row more if there are more."""
    if page.after is not None:
        sql = f"SELECT number FROM {table} WHERE id = ? AND {where}"
        last = db.execute(sql, (page.after, *values)).fetchone()
        if last is None:
            raise InvalidRequest(f"after: there is no {page.after!r}: send an id of the page before", param="after")
        where += f" AND number {'<' if page.order == 'desc' else '>'} ?"
        values += last
    sql = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY number {page.order} LIMIT ?"
    return db.execute(sql, (*values, page.limit + 1)).fetchall()


def drop(db: Connection, id: str, tenant: str | None) -> bool:
    """Deletes a file's record and returns True, or False if there is none. Raises if a batch still reads the file."""
    if not db.execute(f"SELECT 1 FROM files WHERE id = ? AND {OWN.format('tenant')}", (id, tenant, tenant)).fetchone():
        return False
    reader = db.execute("SELECT id FROM batches WHERE input = ? AND open", (id,)).fetchone()
    if reader is not None:
        raise InvalidRequest(
            f"the file {id!r} is read by the batch {reader[0]!r}: cancel it first, or wait", code="file_in_use"
        )
    return db.execute("DELETE FROM files WHERE id = ?", (id,)).rowcount == 1


def drop_expired(db: Connection) -> list[str]:
    """Deletes the records of files that have expired and that no batch reads; returns their ids."""
    over = "expires_at <= ? AND id NOT IN (SELECT input FROM batches WHERE open)"
    ids = [id for (id,) in db.execute(f"SELECT id FROM files WHERE {over}", (time.time(),))]
    db.executemany("DELETE FROM files WHERE id = ?", [(id,) for id in ids])
    return ids


def _file(row: tuple[Any, ...]) -> FileRecord:
    id, bytes, created_at, filename, purpose, expires_at = row
    return FileRecord(
        id=id, bytes=bytes, created_at=created_at, filename=filename, purpose=purpose, expires_at=expires_at
    )

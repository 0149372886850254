"""Reads and writes the records of batches and their lines. Each function is a transaction of the archive, or part of
one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from sqlite3 import Connection
from typing import NamedTuple

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.access.in_flight import owner_limit
from penstock.server.batch import file_records
from penstock.server.batch.file_records import OWN, ExpiresAfter, FileRecord, ListPage, rows_of
from penstock.server.batch.lines import InputLine
from penstock.server.context.request_context import RequestContext

PENDING, COMPLETED, FAILED = range(3)  # states of a line
ENDED = ("completed", "failed", "expired", "cancelled")
MAX_OPEN = 100  # all owners together
MAX_KEPT = 10_000  # ended batches: the owner with the most loses its oldest, but not their files


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchInputDetails(msgspec.Struct):
    cached_tokens: int = 0


class BatchOutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Sums the tokens of all lines that were answered."""

    input_tokens: int = 0
    input_tokens_details: BatchInputDetails = msgspec.field(default_factory=BatchInputDetails)
    output_tokens: int = 0
    output_tokens_details: BatchOutputDetails = msgspec.field(default_factory=BatchOutputDetails)
    total_tokens: int = 0


class BatchError(msgspec.Struct):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: str = "list"


class BatchJob(msgspec.Struct, kw_only=True):
    """Describes a batch, in the shape that clients get."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def ending(self) -> str:
        return "cancelled" if self.cancelling_at else "expired" if self.expired_at else "completed"

    def to(self, status: str) -> None:
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


class Ownership(NamedTuple):
    """Says who made a batch: its requests belong to `owner` and are charged to the API key called `payer`, and the
    batch and its files exist for `tenant`."""

    owner: str | None = None  # None: unknown, as in archives of older servers
    payer: str | None = None  # None: nobody is charged
    tenant: str | None = None  # see file_records.py

    @classmethod
    def of(cls, context: RequestContext) -> Ownership:
        payer = None if context.caller.payer is None else context.caller.payer.name
        return cls(context.caller.owner, payer, context.caller.owner_name)


class PendingLine(NamedTuple):
    """Describes a line that is still to be run, and its place in the input."""

    number: int
    start: int
    size: int
    custom_id: str | None


class LineOutcome(NamedTuple):
    number: int
    state: int
    answer: bytes


# -- batches ------------------------------------------------------------------------------------------------------


def add(db: Connection, batch: BatchJob, ownership: Ownership = Ownership()) -> None:  # noqa: B008
    _make_room(db)
    counted = "SELECT COUNT(*), COALESCE(SUM(tenant IS ?), 0) FROM batches WHERE open"
    open, own = db.execute(counted, (ownership.tenant,)).fetchone()
    if own >= owner_limit(ownership.tenant, MAX_OPEN, open - own):
        raise InvalidRequest(
            f"{own} batches are in progress (the limit): wait for one to end, or cancel it", code="too_many_batches"
        )
    values = (batch.id, batch.input_file_id, _encoded(batch), *ownership)
    columns = "id, input, open, record, owner, payer, tenant"
    db.execute(f"INSERT INTO batches ({columns}) VALUES (?, ?, TRUE, ?, ?, ?, ?)", values)


def _make_room(db: Connection) -> None:
    """Deletes ended batches of the owner with the most, the oldest first, until there is room for one more."""
    ended = db.execute("SELECT COUNT(*) FROM batches WHERE NOT open").fetchone()[0]
    most = "SELECT tenant FROM batches WHERE NOT open GROUP BY tenant ORDER BY COUNT(*) DESC LIMIT 1"
    oldest = f"SELECT MIN(number) FROM batches WHERE NOT open AND tenant IS ({most})"
    for _ in range(ended - MAX_KEPT + 1):
        db.execute(f"DELETE FROM batches WHERE number = ({oldest})")


def ownership(db: Connection, id: str) -> Ownership:
    return Ownership(*db.execute("SELECT owner, payer, tenant FROM batches WHERE id = ?", (id,)).fetchone())


def find(db: Connection, id: str, tenant: str | None) -> BatchJob | None:
    sql = f"SELECT record FROM batches WHERE id = ? AND {OWN.format('tenant')}"
    row = db.execute(sql, (id, tenant, tenant)).fetchone()
    return None if row is None else _batch(row)


def get(db: Connection, id: str) -> BatchJob:
    batch = find(db, id, None)
    assert batch is not None
    return batch


def listed(db: Connection, page: ListPage, tenant: str | None) -> list[BatchJob]:
    """Returns a page, and one more than its limit if there are more."""
    return [_batch(row) for row in rows_of(db, "batches", "record", page, OWN.format("tenant"), (tenant, tenant))]


def open_ids(db: Connection) -> list[str]:
    return [id for (id,) in db.execute("SELECT id FROM batches WHERE open ORDER BY number")]


def advance(db: Connection, id: str, status: str) -> BatchJob:
    """Sets a batch's status, unless it is being cancelled."""
    batch = get(db, id)
    if batch.status != "cancelling":
        batch.to(status)
        save(db, batch)
    return batch


def expire(db: Connection, id: str) -> BatchJob:
    """Ends a batch whose time is over, with the lines that are done."""
    batch = advance(db, id, "finalizing")
    if batch.status == "finalizing":
        batch.expired_at = int(time.time())
        save(db, batch)
    return batch


def cancel(db: Connection, id: str, tenant: str | None) -> BatchJob | None:
    batch = find(db, id, tenant)
    if batch is not None and batch.status in ("validating", "in_progress"):
        batch.to("cancelling")
        save(db, batch)
    return batch


def fail(db: Connection, id: str, error: BatchError) -> BatchJob:
    batch = get(db, id)
    batch.errors = BatchErrors([error])
    _end(db, batch, "failed")
    return batch


def finish(db: Connection, id: str, output: FileRecord | None, errors: FileRecord | None) -> None:
    """Ends a batch whose files are written; its lines are in them."""
    batch = get(db, id)
    for file in (output, errors):
        if file is not None:
            file_records.add(db, file, ownership(db, id).tenant)
    batch.output_file_id = None if output is None else output.id
    batch.error_file_id = None if errors is None else errors.id
    _end(db, batch, batch.ending)


def save(db: Connection, batch: BatchJob) -> None:
    open = batch.status not in ENDED
    db.execute("UPDATE batches SET record = ?, open = ? WHERE id = ?", (_encoded(batch), open, batch.id))


def _end(db: Connection, batch: BatchJob, status: str) -> None:
    batch.to(status)
    save(db, batch)
    db.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))


def _batch(row: tuple[bytes]) -> BatchJob:
    return msgspec.json.decode(row[0], type=BatchJob)


def _encoded(batch: BatchJob) -> bytes:
    return msgspec.json.encode(batch)


# -- lines --------------------------------------------------------------------------------------------------------


def forget_lines(db: Connection, id: str) -> None:
    """Deletes the lines of a batch whose input was being read when a server was killed."""
    batch = get(db, id)
    batch.request_counts = RequestCounts()
    save(db, batch)
    db.execute("DELETE FROM lines WHERE batch = ?", (id,))


def add_lines(db: Connection, id: str, entries: Sequence[InputLine]) -> None:
    batch = get(db, id)
    counts = batch.request_counts
    counts.total += len(entries)
    counts.failed += sum(entry.fault is not None for entry in entries)
    save(db, batch)
    db.executemany(
        "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (id, e.number, e.start, e.size, e.custom_id, PENDING if e.fault is None else FAILED, e.fault)
            for e in entries
        ],
    )


def pending(db: Connection, id: str, after: int, most: int) -> list[PendingLine]:
    sql = "SELECT number, start, size, custom_id FROM lines WHERE batch = ? AND number > ? AND state = ? "
    return [PendingLine(*row) for row in db.execute(sql + "ORDER BY number LIMIT ?", (id, after, PENDING, most))]


def outcomes(db: Connection, id: str, after: int, most: int) -> list[LineOutcome]:
    sql = "SELECT number, state, answer FROM lines WHERE batch = ? AND number > ? AND state != ? "
    return [LineOutcome(*row) for row in db.execute(sql + "ORDER BY number LIMIT ?", (id, after, PENDING, most))]


def record(db: Connection, id: str, outcomes: Iterable[LineOutcome], usage: BatchUsage | None = None) -> None:
    """Records outcomes of lines. The first outcome of a line counts."""
    batch = get(db, id)
    sql = "UPDATE lines SET state = ?, answer = ? WHERE batch = ? AND number = ? AND state = ?"
    for number, state, answer in outcomes:
        if db.execute(sql, (state, answer, id, number, PENDING)).rowcount:
            batch.request_counts.completed += state == COMPLETED
            batch.request_counts.failed += state == FAILED
    if usage is not None:
        _add_usage(batch.usage, usage)
    save(db, batch)


def _add_usage(whole: BatchUsage, part: BatchUsage) -> None:
    whole.input_tokens += part.input_tokens
    whole.input_tokens_details.cached_tokens += part.input_tokens_details.cached_tokens
    whole.output_tokens += part.output_tokens
    whole.output_tokens_details.reasoning_tokens += part.output_tokens_details.reasoning_tokens
    whole.total_tokens += part.total_tokens

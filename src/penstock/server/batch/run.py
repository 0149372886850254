"""Runs batches: reads the input, calls the application for each line, and writes the files.

Each line is a background request: the engine's policy runs it behind every client's. Batches take turns, a line each.
The outcome of a line is recorded before it counts as done, so a server that is killed leaves only lines that the next
one runs again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from itertools import islice
from typing import Any

import msgspec
from starlette.types import ASGIApp

from penstock.errors import InvalidRequest, PenstockError
from penstock.server.access.accounts import Account, Accounts
from penstock.server.batch import lines, records
from penstock.server.batch.app_call import AppAnswer, call_app
from penstock.server.batch.archive import Archive, Draft
from penstock.server.batch.file_records import FileRecord
from penstock.server.batch.lines import MAX_LINES, encode_answer, encode_fault
from penstock.server.batch.records import (
    COMPLETED,
    ENDED,
    FAILED,
    BatchError,
    BatchJob,
    BatchUsage,
    LineOutcome,
    Ownership,
    PendingLine,
)
from penstock.server.context.caller import Caller
from penstock.server.context.request_context import RequestContext
from penstock.server.context.service import Service
from penstock.server.models.pool import ModelPool
from penstock.service_levels import STANDARD_TERMS, ServiceTerms

CHUNK = 100  # lines per transaction
MAX_ATTEMPTS = 3  # at a line during which the engine dies
LINES_WITHOUT_ENGINE = 8  # in flight at least: how many rows a model computes is only known once it is loaded
BYTES_PER_TOKEN = 4  # estimate
ANSWER_TOKENS = 256  # estimate for an answer without a limit
RETRY_SECONDS = 1.0  # until the next try, without an engine or while another server uses the folder

BROKEN = InvalidRequest("the server failed while it answered this line; its log has the details", code="internal_error")

log = logging.getLogger(__name__)


class BatchRunner:
    """Runs all batches. A batch is charged to the key that made it, from `accounts`, if there are keys. If `lenient`,
    unknown fields of lines are ignored."""

    def __init__(
        self,
        archive: Archive,
        pool: ModelPool,
        accounts: Accounts | None = None,
        *,
        lenient: bool = True,
        terms: ServiceTerms = STANDARD_TERMS,
    ) -> None:
        self._archive = archive
        self._pool = pool
        self._accounts = accounts
        self._lenient = lenient
        self._terms = terms
        self._runs: dict[str, asyncio.Task[None]] = {}  # keys are batch ids
        self._works: dict[str, asyncio.Task[None]] = {}  # keys are batch ids: the part of a run that a cancel stops

    @asynccontextmanager
    async def running(self, app: ASGIApp) -> AsyncIterator[None]:
        """Runs batches while the application runs, and first those that an earlier server left."""
        self._app = app
        in_flight = max(LINES_WITHOUT_ENGINE, self._pool.models.rows // 2)
        self._lines = asyncio.Semaphore(in_flight)  # batches take turns
        resuming = asyncio.create_task(self._with_retries(self._resume))
        try:
            yield
        finally:
            tasks = {resuming, *self._runs.values()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._archive.close()

    def start(self, id: str) -> None:
        if id not in self._runs:
            self._runs[id] = asyncio.create_task(self._with_retries(lambda: self._run(id)))
            self._runs[id].add_done_callback(lambda _: self._runs.pop(id))

    def stop(self, id: str) -> None:
        """Stops a batch: its lines in flight are abandoned, and no more are run."""
        if id in self._works:
            self._works[id].cancel()

    async def _with_retries(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work` until it succeeds: the disk may be full, or another server may use the folder."""
        logged = ""
        while True:
            try:
                return await work()
            except PenstockError as error:
                if error.message != logged:
                    log.warning("batches cannot run now and are retried: %s", error.message)
                logged = error.message
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                return log.exception("a batch failed and stays as it is until the server is restarted")

    async def _resume(self) -> None:
        if self._archive.used:
            for id in await self._archive.do(records.open_ids):
                self.start(id)

    async def _run(self, id: str) -> None:
        batch = await self._archive.do(records.get, id)
        if batch.status in ("validating", "in_progress"):
            await self._work_until_over(batch)
            batch = await self._archive.do(records.get, id)
        if batch.status not in ENDED:
            await self._finish(batch)

    async def _work_until_over(self, batch: BatchJob) -> None:
        work = self._works[batch.id] = asyncio.create_task(self._work(batch))
        try:
            await asyncio.wait({work}, timeout=max(0, batch.expires_at - time.time()))
            over = not work.done()
        finally:
            work.cancel()
            await asyncio.wait({work})
            del self._works[batch.id]
        if over:
            await self._archive.do(records.expire, batch.id)
        elif not work.cancelled():
            work.result()

    async def _work(self, batch: BatchJob) -> None:
        if batch.status == "validating":
            batch = await self._read(batch)
        if batch.status == "in_progress":
            await self._run_lines(batch)
            await self._archive.do(records.advance, batch.id, "finalizing")

    async def _read(self, batch: BatchJob) -> BatchJob:
        await self._archive.do(records.forget_lines, batch.id)
        entries = lines.entries(self._archive.path(batch.input_file_id), batch.endpoint, lenient=self._lenient)
        total = 0
        while chunk := await asyncio.to_thread(lambda: list(islice(entries, CHUNK))):
            total += len(chunk)
            if total > MAX_LINES:
                error = BatchError("too_many_tasks", f"the file has more than {MAX_LINES} lines (the limit): split it")
                return await self._archive.do(records.fail, batch.id, error)
            await self._archive.do(records.add_lines, batch.id, chunk)
        if not total:
            error = BatchError("empty_file", "the file has no lines: each line must be a request")
            return await self._archive.do(records.fail, batch.id, error)
        return await self._archive.do(records.advance, batch.id, "in_progress")

    # -- lines ---------------------------------------------------------------------------------------------------

    async def _run_lines(self, batch: BatchJob) -> None:
        try:
            async with asyncio.TaskGroup() as running:
                await self._start_lines(batch, running)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _start_lines(self, batch: BatchJob, running: asyncio.TaskGroup) -> None:
        ownership = await self._archive.do(records.ownership, batch.id)
        after = 0
        while lines := await self._archive.do(records.pending, batch.id, after, CHUNK):
            for line in lines:
                await self._lines.acquire()
                task = running.create_task(self._run_line(batch, line, ownership))
                task.add_done_callback(lambda _: self._lines.release())
            after = lines[-1].number

    async def _run_line(self, batch: BatchJob, line: PendingLine, ownership: Ownership) -> None:
        path = self._archive.path(batch.input_file_id)
        usage = None
        try:
            body = await asyncio.to_thread(lines.body_of, path, line.start, line.size)
            answer = await self._answer(ownership, batch.endpoint, body)
            state = COMPLETED if answer.status < 400 else FAILED
            output = encode_answer(line.custom_id, answer.status, answer.request_id, answer.body)
            usage = usage_of(answer.body) if state == COMPLETED else None
        except Exception:
            log.exception("line %d of the batch %s failed", line.number, batch.id)
            state, output = FAILED, encode_fault(line.custom_id, BROKEN, line.number)
        await self._archive.do(records.record, batch.id, [LineOutcome(line.number, state, output)], usage)

    def _context(self, ownership: Ownership) -> RequestContext:
        owner = ownership.owner or secrets.token_hex(8)  # unknown: nobody's
        payer = self._payer(ownership.payer)
        return RequestContext(
            lenient=self._lenient,
            caller=Caller(owner=owner, payer=payer, tenants=bool(self._terms.tenant_header)),
            service=Service(background=True, terms=self._terms),
        )

    def _payer(self, name: str | None) -> Account | None:
        return None if name is None or self._accounts is None else self._accounts.named(name)

    def _reserving(self, ownership: Ownership, body: bytes) -> AbstractAsyncContextManager[None]:
        """Waits until the key that pays for a line has tokens for it."""
        payer = self._payer(ownership.payer)
        return nullcontext() if payer is None else payer.reserving(expected_tokens(body))

    async def _answer(self, ownership: Ownership, endpoint: str, body: bytes) -> AppAnswer:
        """Returns the answer to a line. A line is retried if the engine is overloaded or dies, unless the engine dies
        of it MAX_ATTEMPTS times."""
        deaths = 0
        while True:
            async with self._reserving(ownership, body):
                answer = await call_app(self._app, self._context(ownership), endpoint, body)
            if answer.status not in (429, 503):
                return answer
            deaths += b'"engine_died"' in answer.body
            if deaths == MAX_ATTEMPTS:
                return answer
            await asyncio.sleep(RETRY_SECONDS)

    # -- files ---------------------------------------------------------------------------------------------------

    async def _finish(self, batch: BatchJob) -> None:
        archive, id = self._archive, batch.id
        while left := await archive.do(records.pending, id, 0, CHUNK):
            await archive.do(records.record, id, [_not_run(batch, line) for line in left])
        async with archive.draft() as output, archive.draft() as errors:
            await self._write(id, output, errors)
            files = [_file(batch, draft, kind) for draft, kind in ((output, "output"), (errors, "error"))]
            await archive.keep([draft for draft in (output, errors) if draft.size], records.finish, id, *files)
        await archive.do(lambda db: db.execute("PRAGMA incremental_vacuum").fetchall())

    async def _write(self, id: str, output: Draft, errors: Draft) -> None:
        after = 0
        while found := await self._archive.do(records.outcomes, id, after, CHUNK):
            for _, state, answer in found:
                await (output if state == COMPLETED else errors).write(answer + b"\n")
            after = found[-1].number


def _not_run(batch: BatchJob, line: PendingLine) -> LineOutcome:
    reason = "its batch was cancelled" if batch.ending == "cancelled" else "its batch expired"
    error = InvalidRequest(f"this request was not run: {reason}", code=f"batch_{batch.ending}")
    return LineOutcome(line.number, FAILED, encode_fault(line.custom_id, error, line.number))


def _file(batch: BatchJob, draft: Draft, kind: str) -> FileRecord | None:
    if not draft.size:
        return None
    expires_after = batch.output_expires_after
    now = int(time.time())
    return FileRecord(
        id=draft.id,
        bytes=draft.size,
        created_at=now,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose="batch_output",
        expires_at=None if expires_after is None else now + expires_after.seconds,
    )


class LineLength(msgspec.Struct):
    """Reads no more of a line than how long its answer may be, in each dialect that lines have."""

    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None


def expected_tokens(body: bytes) -> int:
    """Estimates the tokens of a line: its text, and the limit of its answer."""
    try:
        line = msgspec.json.decode(body, type=LineLength)
    except msgspec.MsgspecError:
        return 0  # it is refused, and takes none
    limits = (line.max_completion_tokens, line.max_tokens, line.max_output_tokens)
    answer = next((limit for limit in limits if isinstance(limit, int) and limit > 0), ANSWER_TOKENS)
    return len(body) // BYTES_PER_TOKEN + answer


class AnswerUsage(msgspec.Struct):
    usage: dict[str, Any] | None = None


def usage_of(answer: bytes) -> BatchUsage:
    """Returns the usage that an answer reports, in the fields of chat and completions or of responses."""
    fields = msgspec.json.decode(answer, type=AnswerUsage).usage or {}
    usage = BatchUsage(
        input_tokens=fields.get("input_tokens", fields.get("prompt_tokens", 0)),
        output_tokens=fields.get("output_tokens", fields.get("completion_tokens", 0)),
        total_tokens=fields.get("total_tokens", 0),
    )
    inputs = fields.get("input_tokens_details", fields.get("prompt_tokens_details")) or {}
    outputs = fields.get("output_tokens_details", fields.get("completion_tokens_details")) or {}
    usage.input_tokens_details.cached_tokens = inputs.get("cached_tokens", 0)
    usage.output_tokens_details.reasoning_tokens = outputs.get("reasoning_tokens", 0)
    return usage

"""Runs batches: reads the input, asks the application for each line, writes the files.

Lines are asked for as a client would ask. At most half as many as the engine computes at once are under way; batches
take turns, a line each. What a line came to is recorded before it counts as done: a server that is killed leaves
nothing but lines that its successor runs again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import msgspec
from starlette.types import ASGIApp

from penstock.errors import InvalidRequest, PenstockError
from penstock.server.batch import lines, records
from penstock.server.batch.archive import Archive, Draft
from penstock.server.batch.background_client import AppAnswer, Behind, ask
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
    PendingLine,
)
from penstock.server.served_model import ServedModel

CHUNK = 100  # lines looked at in one transaction
TRIES = 3  # of a line whose engine dies
PATIENCE = 1.0  # seconds between looks for what is not there yet: an engine, or a folder that another server holds

BROKEN = InvalidRequest("the server failed while it answered this line; its log has the details", code="internal_error")

log = logging.getLogger(__name__)


class BatchRunner:
    def __init__(self, archive: Archive, served: ServedModel) -> None:
        self._archive = archive
        self._served = served
        self._runs: dict[str, asyncio.Task[None]] = {}  # by batch
        self._works: dict[str, asyncio.Task[None]] = {}  # of those, what a cancel stops

    @asynccontextmanager
    async def running(self, app: ASGIApp) -> AsyncIterator[None]:
        """While the application runs: first come the batches that a server before this one left."""
        rows = max(1, self._served.limits.max_rows // 2)
        self._app = app
        self._lines = asyncio.Semaphore(rows)  # first come, first served: so batches take turns
        self._behind = self._served._replace(client=Behind(self._served.client, rows), line=None)
        resuming = asyncio.create_task(self._patiently(self._resume))
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
            self._runs[id] = asyncio.create_task(self._patiently(lambda: self._run(id)))
            self._runs[id].add_done_callback(lambda _: self._runs.pop(id))

    def stop(self, id: str) -> None:
        """No more of its lines are run; those under way are given up."""
        if id in self._works:
            self._works[id].cancel()

    async def _patiently(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Again and again, until the disk or whoever else is in the way lets it be done."""
        trouble = ""
        while True:
            try:
                return await work()
            except PenstockError as error:
                if error.message != trouble:
                    log.warning("batches wait: %s", error.message)
                trouble = error.message
                await asyncio.sleep(PATIENCE)
            except Exception:
                return log.exception("what is left of batches stands still until the server is started again")

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
        """Until it is done, was cancelled, or its time is over."""
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
        entries = lines.entries(self._archive.path(batch.input_file_id), batch.endpoint)
        total = 0
        while chunk := await asyncio.to_thread(lambda: list(islice(entries, CHUNK))):
            total += len(chunk)
            if total > MAX_LINES:
                error = BatchError("too_many_tasks", f"the file has more than {MAX_LINES} lines: split it")
                return await self._archive.do(records.fail, batch.id, error)
            await self._archive.do(records.add_lines, batch.id, chunk)
        if not total:
            error = BatchError("empty_file", "the file has no lines: each is to be a request")
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
        after = 0
        while lines := await self._archive.do(records.pending, batch.id, after, CHUNK):
            for line in lines:
                await self._lines.acquire()
                task = running.create_task(self._run_line(batch, line))
                task.add_done_callback(lambda _: self._lines.release())
            after = lines[-1].number

    async def _run_line(self, batch: BatchJob, line: PendingLine) -> None:
        path = self._archive.path(batch.input_file_id)
        usage = None
        try:
            body = await asyncio.to_thread(lines.body_of, path, line.start, line.size)
            answer = await self._ask(batch.endpoint, body)
            state = COMPLETED if answer.status < 400 else FAILED
            told = encode_answer(line.custom_id, answer.status, answer.request_id, answer.body)
            usage = usage_of(answer.body) if state == COMPLETED else None
        except Exception:
            log.exception("line %d of the batch %s failed", line.number, batch.id)
            state, told = FAILED, encode_fault(line.custom_id, BROKEN, line.number)
        await self._archive.do(records.record, batch.id, [LineOutcome(line.number, state, told)], usage)

    async def _ask(self, endpoint: str, body: bytes) -> AppAnswer:
        """An engine that dies or has no place is no fault of the line's, unless it dies of it."""
        deaths = 0
        while True:
            answer = await ask(self._app, self._behind, endpoint, body)
            if answer.status not in (429, 503):
                return answer
            deaths += b'"engine_died"' in answer.body
            if deaths == TRIES:
                return answer
            await asyncio.sleep(PATIENCE)

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
    why = "its batch was cancelled" if batch.ending == "cancelled" else "its batch's time was over"
    error = InvalidRequest(f"this request was not run: {why}", code=f"batch_{batch.ending}")
    return LineOutcome(line.number, FAILED, encode_fault(line.custom_id, error, line.number))


def _file(batch: BatchJob, draft: Draft, kind: str) -> FileRecord | None:
    if not draft.size:
        return None
    kept = batch.output_expires_after
    now = int(time.time())
    return FileRecord(
        id=draft.id,
        bytes=draft.size,
        created_at=now,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose="batch_output",
        expires_at=None if kept is None else now + kept.seconds,
    )


class AnswerUsage(msgspec.Struct):
    usage: dict[str, Any] | None = None


def usage_of(answer: bytes) -> BatchUsage:
    """As chat and completions count, or as responses do."""
    used = msgspec.json.decode(answer, type=AnswerUsage).usage or {}
    usage = BatchUsage(
        input_tokens=used.get("input_tokens", used.get("prompt_tokens", 0)),
        output_tokens=used.get("output_tokens", used.get("completion_tokens", 0)),
        total_tokens=used.get("total_tokens", 0),
    )
    read = used.get("input_tokens_details", used.get("prompt_tokens_details")) or {}
    said = used.get("output_tokens_details", used.get("completion_tokens_details")) or {}
    usage.input_tokens_details.cached_tokens = read.get("cached_tokens", 0)
    usage.output_tokens_details.reasoning_tokens = said.get("reasoning_tokens", 0)
    return usage

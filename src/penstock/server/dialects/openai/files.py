"""Serves /v1/files: uploads, and the output of batches."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from penstock.errors import InvalidRequest
from penstock.server.batch import file_records
from penstock.server.batch.archive import Draft
from penstock.server.batch.file_records import DAY, ExpiresAfter, FileRecord, FileRoom, ListPage, Order
from penstock.server.batch.form import Form
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import read_object
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.pool import ModelPool
from penstock.server.services import Endpoints, Services

BATCH_INPUT_SECONDS = 30 * DAY  # default expiry of a batch's input
MAX_FILENAME = 255

S = TypeVar("S", bound=msgspec.Struct)


class FileUpload(msgspec.Struct, forbid_unknown_fields=True):
    purpose: Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
    expires_after: ExpiresAfter | None = None


class FilesQuery(msgspec.Struct, forbid_unknown_fields=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Order = "desc"
    purpose: str | None = None


UPLOAD = Operation("multipart/form-data", answers=FileRecord)
LIST_FILES = Operation(query=FilesQuery)
SHOW_FILE = Operation(answers=FileRecord)
FILE_CONTENT = Operation(answers="application/octet-stream")


class Files(Endpoints):
    """Holds the endpoints of files."""

    def __init__(self, services: Services) -> None:
        self._archive = services.archive
        self._uploading: Counter[str | None] = Counter()  # bytes of uploads in progress, by owner

    async def create(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        form = Form(http.headers.get("content-type", ""))
        await self._drop_expired()
        async with self._archive.draft() as draft:
            try:
                await self._receive(http, form, draft, context.caller.owner_name)
                file = _file(context, draft, form)
                await self._archive.keep(
                    [draft], file_records.add, file, context.caller.owner_name, self._archive.space
                )
            finally:
                self._uploading[context.caller.owner_name] -= draft.size
        return json_response(file)

    async def list_all(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        query = read_query(context, http, FilesQuery)
        page = ListPage(query.after, query.limit, query.order)
        found = await self._archive.do(file_records.listed, page, query.purpose, context.caller.owner_name)
        return page_response(found, page)

    async def show(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        return json_response(await self._find(http, context))

    async def content(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        """Returns the file as plain bytes of no type, so that no browser shows them as a page."""
        file = await self._find(http, context)
        path = self._archive.path(file.id)
        try:
            stat = await asyncio.to_thread(path.stat)
        except FileNotFoundError:  # deleted since
            raise _missing(file.id) from None
        headers = {"x-content-type-options": "nosniff"}
        return FileResponse(path, 200, headers, "application/octet-stream", stat_result=stat)

    async def delete(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        id = http.path_params["id"]
        if not await self._archive.do(file_records.drop, id, context.caller.owner_name):
            raise _missing(id)
        await self._archive.remove([id])
        return json_response({"id": id, "object": "file", "deleted": True})

    async def _find(self, http: HttpRequest, context: RequestContext) -> FileRecord:
        id = http.path_params["id"]
        file = await self._archive.do(file_records.find, id, context.caller.owner_name)
        if file is None:
            raise _missing(id)
        return file

    async def _drop_expired(self) -> None:
        await self._archive.remove(await self._archive.do(file_records.drop_expired))

    async def _receive(self, http: HttpRequest, form: Form, draft: Draft, owner: str | None) -> None:
        """Writes the upload to the draft. A refused upload is read to its end but not kept, so that the client reads
        the reason."""
        room = await self._archive.do(file_records.room, owner, self._archive.space)
        refusal: InvalidRequest | None = None
        async for data in http.stream():
            if refusal is not None:
                continue
            try:
                await self._take(form.push(data), draft, owner, room)
            except InvalidRequest as error:
                refusal = error
        if refusal is not None:
            raise refusal
        form.finish()

    async def _take(self, data: bytes, draft: Draft, owner: str | None, room: FileRoom) -> None:
        space = self._archive.space
        if draft.size + len(data) > space.file_bytes:
            raise InvalidRequest(
                f"the file has more than {space.file_bytes} bytes: split it", param="file", code="request_too_large"
            )
        room.check(self._uploading[owner] + len(data))
        self._uploading[owner] += len(data)
        await draft.write(data)


def _file(context: RequestContext, draft: Draft, form: Form) -> FileRecord:
    assert form.filename is not None
    if len(form.filename) > MAX_FILENAME:
        raise InvalidRequest(
            f"the file's name has {len(form.filename)} characters; the limit is {MAX_FILENAME}: shorten it",
            param="file",
        )
    body = read_object(context, _nested(form.fields), FileUpload, {})
    now = int(time.time())
    default = BATCH_INPUT_SECONDS if body.purpose == "batch" else None
    seconds = body.expires_after.seconds if body.expires_after else default
    return FileRecord(
        id=draft.id,
        bytes=draft.size,
        created_at=now,
        filename=form.filename,
        purpose=body.purpose,
        expires_at=None if seconds is None else now + seconds,
    )


def _nested(fields: dict[str, str]) -> dict[str, Any]:
    """Returns the form's fields with `expires_after[seconds]`, a form's spelling of a nested field, as an object."""
    given: dict[str, Any] = {}
    for name, value in fields.items():
        outer, bracket, inner = name.removesuffix("]").partition("[")
        if bracket and outer == "expires_after":
            given.setdefault(outer, {})[inner] = _number(value)
        else:
            given[name] = value
    return given


def _missing(id: str) -> HTTPException:
    return HTTPException(404, f"there is no file {id!r} here")


# -- queries and pages, also for batches -----------------------------------------------------------------------------


def read_query(context: RequestContext, http: HttpRequest, kind: type[S]) -> S:
    given: dict[str, Any] = dict(http.query_params)
    if "limit" in given:
        given["limit"] = _number(given["limit"])
    return read_object(context, given, kind, {})


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 20 else text


def page_response(found: Sequence[Any], page: ListPage) -> Response:
    shown = found[: page.limit]
    ends = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": shown, "has_more": len(found) > page.limit} | ends)

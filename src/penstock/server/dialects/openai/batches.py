"""Serves /v1/batches, which answer a file of requests with a file of answers."""

from __future__ import annotations

import secrets
import time
from sqlite3 import Connection
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import InvalidRequest
from penstock.server.batch import file_records, records
from penstock.server.batch.archive import Space
from penstock.server.batch.file_records import DAY, ExpiresAfter, ListPage
from penstock.server.batch.records import BatchJob, Ownership
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.openai.files import page_response, read_query
from penstock.server.dialects.openai.metadata import read_metadata
from penstock.server.http.bodies import read_body
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.pool import ModelPool
from penstock.server.services import Endpoints, Services

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
WINDOW = "24h"
WINDOW_SECONDS = DAY


class CreateBatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchesQuery(msgspec.Struct, forbid_unknown_fields=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


CREATE_BATCH = Operation(CreateBatch, {}, BatchJob)
LIST_BATCHES = Operation(query=BatchesQuery)
SHOW_BATCH = Operation(answers=BatchJob)


class Batches(Endpoints):
    """Holds the endpoints of batches."""

    def __init__(self, services: Services) -> None:
        self._archive = services.archive
        self._runner = services.batches

    async def create(self, pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        body = await read_body(http, context, CreateBatch, {})
        _check(body, [route.path for route in http.app.routes if isinstance(route, Route)])
        now = int(time.time())
        batch = BatchJob(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=body.endpoint,
            model=pool.models.default.name,
            input_file_id=body.input_file_id,
            completion_window=WINDOW,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=body.metadata,
            output_expires_after=body.output_expires_after,
        )
        await self._archive.do(_add, batch, Ownership.of(context), self._archive.space)
        self._runner.start(batch.id)
        return json_response(batch)

    async def list_all(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        query = read_query(context, http, BatchesQuery)
        page = ListPage(query.after, query.limit)
        return page_response(await self._archive.do(records.listed, page, context.caller.owner_name), page)

    async def show(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        id = http.path_params["id"]
        return json_response(_present(await self._archive.do(records.find, id, context.caller.owner_name), id))

    async def cancel(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        id = http.path_params["id"]
        batch = _present(await self._archive.do(records.cancel, id, context.caller.owner_name), id)
        if batch.status not in ("cancelling", "cancelled"):
            raise InvalidRequest(f"the batch {id!r} is {batch.status} and can no longer be cancelled")
        self._runner.stop(id)
        return json_response(batch)


def _check(body: CreateBatch, routed: list[str]) -> None:
    offered = [path for path in ENDPOINTS if path in routed]
    if body.endpoint not in offered:
        raise InvalidRequest(
            f"endpoint must be one of {', '.join(offered)}; got {body.endpoint[:100]!r}",
            param="endpoint",
            code="invalid_endpoint",
        )
    if body.completion_window != WINDOW:
        raise InvalidRequest(
            f"completion_window must be {WINDOW!r}; got {body.completion_window[:100]!r}",
            param="completion_window",
            code="invalid_completion_window",
        )
    read_metadata(body.metadata)


def _add(db: Connection, batch: BatchJob, ownership: Ownership, space: Space) -> None:
    id = batch.input_file_id
    file = file_records.find(db, id, ownership.tenant)
    if file is None:
        raise InvalidRequest(f"there is no file {id[:100]!r} here", param="input_file_id", code="file_not_found")
    if file.purpose != "batch":
        raise InvalidRequest(
            f"the file {id!r} was uploaded with purpose {file.purpose!r}: upload it with purpose 'batch'",
            param="input_file_id",
            code="invalid_purpose",
        )
    file_records.room(db, ownership.tenant, space).check(0)  # its output will be one more
    records.add(db, batch, ownership)


def _present(batch: BatchJob | None, id: str) -> BatchJob:
    if batch is None:
        raise HTTPException(404, f"there is no batch {id!r} here")
    return batch

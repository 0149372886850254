"""Serves llama.cpp's /lora-adapters: a model's adapters, and the scales of those that requests without any get."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import read_json
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.adapter_fields import NumberedAdapters, numbered_uses
from penstock.server.http.bodies import body_of, read_object
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.entry import ModelEntry
from penstock.server.models.pool import ModelPool


class AdapterQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None  # left out: the first


class AdapterScale(msgspec.Struct):
    """Lists an adapter. Its scale is that on requests that say nothing about adapters: 0, until it is set."""

    id: int
    name: str
    path: str
    scale: float


LIST_ADAPTERS = Operation(answers=list[AdapterScale], query=AdapterQuery)
SCALE_ADAPTERS = Operation(NumberedAdapters, {}, query=AdapterQuery)


async def list_adapters(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    entry = _model(pool, http, context)
    return json_response(
        [
            AdapterScale(id, adapter.name, adapter.path, entry.adapter_scales.get(adapter.name, 0.0))
            for id, adapter in enumerate(entry.listed_adapters)
        ]
    )


async def scale_adapters(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Sets the scales of all adapters: those that the list leaves out are not used."""
    entry = _model(pool, http, context)
    given = read_json(await body_of(http, context), "the body")
    try:
        scales = msgspec.convert(given, NumberedAdapters)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body is a list of objects with id and scale: {error}") from error
    entry.adapter_scales = {use.name: use.scale for use in numbered_uses(entry.listed_adapters, scales)}
    return json_response({"success": True})


def _model(pool: ModelPool, http: HttpRequest, context: RequestContext) -> ModelEntry:
    query = read_object(context, dict(http.query_params), AdapterQuery, {}, strict=False)
    entry = pool.models.default if query.model is None else pool.models.get(query.model, context)
    context.caller.check_allowed(entry.name)
    return entry

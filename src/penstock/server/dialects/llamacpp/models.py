"""Serves what clients of llama.cpp's router use: which models are loaded, and loading and unloading them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import read_body
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.entry import ModelEntry, ModelState
from penstock.server.models.pool import ModelPool
from penstock.server.status.endpoints import list_models, listed

STATUS = {
    ModelState.STORED: "unloaded",
    ModelState.LOADING: "loading",
    ModelState.AWAKE: "loaded",
    ModelState.ASLEEP: "sleeping",
    ModelState.UNLOADING: "unloaded",
}


class RouterModel(msgspec.Struct, forbid_unknown_fields=True):
    model: str


NAMED = Operation(RouterModel, {})


async def list_with_status(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Lists the models as /v1/models does, with the status that the router's clients read. A server of one model lists
    it as llama.cpp's single-model server does."""
    if len(pool.models.entries) == 1:
        return await list_models(pool, http, context)
    data = [model | _status(entry) for entry, model in listed(pool, context)]
    return json_response({"object": "list", "data": data})


def _status(entry: ModelEntry) -> dict[str, Any]:
    path = entry.source.path
    status: dict[str, Any] = {"value": STATUS[entry.state]} | ({"failed": True} if entry.error else {})
    return {"in_cache": path is not None, "path": "" if path is None else str(path), "status": status}


async def load(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Answers when the model is loaded."""
    body = await read_body(http, context, RouterModel, {})
    await pool.load(body.model)
    return json_response({"success": True})


async def unload(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Answers when the model is unloaded, which is after its answers have ended."""
    body = await read_body(http, context, RouterModel, {})
    await pool.unload(body.model)
    return json_response({"success": True})

"""Serves llama-swap's view of the models: which run, and unloading them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from penstock.server.context.request_context import RequestContext
from penstock.server.http.sse import json_response
from penstock.server.models.entry import ModelState
from penstock.server.models.pool import ModelPool
from penstock.server.models.visible import may_see

STATES = {ModelState.LOADING: "starting", ModelState.AWAKE: "ready", ModelState.UNLOADING: "stopping"}


async def running(pool: ModelPool, _: HttpRequest, context: RequestContext) -> Response:
    entries = [entry for entry in pool.models.entries if entry.state in STATES and may_see(context, entry)]
    here = [{"model": entry.name, "state": STATES[entry.state]} for entry in entries]
    return json_response({"running": here})


async def unload_all(pool: ModelPool, _: HttpRequest, __: RequestContext) -> Response:
    await asyncio.gather(*(pool.unload(entry.name) for entry in pool.models.entries if entry.served is not None))
    return PlainTextResponse("OK")


async def unload_one(pool: ModelPool, http: HttpRequest, __: RequestContext) -> Response:
    await pool.unload(http.path_params["id"])
    return PlainTextResponse("OK")

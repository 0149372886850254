"""Serves vLLM's /sleep, /wake_up and /is_sleeping, for the default model or the one that `?model=` names."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import read_object
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.entry import ModelState
from penstock.server.models.pool import ModelPool


class SleepingQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None


class SleepQuery(SleepingQuery, kw_only=True):
    level: Literal["0", "1", "2"] | None = None  # 2: weights are not kept in host memory
    mode: Literal["abort", "wait", "keep"] | None = None


class WakeUpQuery(SleepingQuery, kw_only=True):
    tags: str | None = None  # vLLM's parts to wake; here all are woken


SLEEP = Operation(query=SleepQuery, answers=None)
WAKE_UP = Operation(query=WakeUpQuery, answers=None)
SLEEPING = Operation(query=SleepingQuery)


async def sleep(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Answers when the model sleeps, which is after its answers have ended."""
    query = read_object(context, dict(http.query_params), SleepQuery, {})
    await pool.sleep(query.model or pool.models.default.name, keep_weights=query.level != "2")
    return Response()


async def wake_up(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    query = read_object(context, dict(http.query_params), WakeUpQuery, {})
    await pool.load(query.model or pool.models.default.name)
    return Response()


async def is_sleeping(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    query = read_object(context, dict(http.query_params), SleepingQuery, {})
    entry = pool.models.get(query.model or pool.models.default.name, context)
    context.caller.check_allowed(entry.name)
    return json_response({"is_sleeping": entry.state is ModelState.ASLEEP})

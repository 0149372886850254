"""Serves vLLM's routes for training loops: pauses, other weights, and the prefix cache."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import read_body, read_object
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.pool import ModelPool
from penstock.server.models.weights import client_of, update_weights
from penstock.types import PAUSE_KEEP
from penstock.types.messages import AbortAll, DescribeWeights, FlushCache, Pause, Resume


class WeightsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None  # left out: the first


class PauseQuery(WeightsQuery, kw_only=True):
    mode: Literal["abort", "wait", "keep"] | None = None  # left out: keep
    clear_cache: str | None = None  # no effect: KV of other weights is never reused
    wait_for_inflight_requests: Literal["true", "false", "1", "0"] | None = None  # the older name of mode=wait


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    path: Annotated[str, Meta(min_length=1)]


class UpdateWeightsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Names a folder or GGUF file on the server's machine, as `path` or where vLLM has it, in `update_info`."""

    path: Annotated[str, Meta(min_length=1)] | None = None
    update_info: UpdateInfo | None = None
    weight_version: str | None = None  # left out: the number of the update
    recompute: bool = True  # KV of running requests is computed again; false: they keep the old KV
    model: str | None = None  # left out: the first


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    request_ids: list[str] | None = None
    model: str | None = None  # left out: the first


class WeightInfo(msgspec.Struct):
    weight_version: str
    updates: int  # since the server was started
    path: str | None  # source of the weights; null: the model's own files


class Updated(WeightInfo):
    message: str = "Weights updated"


class PauseStatus(msgspec.Struct):
    status: str


PAUSE = Operation(query=PauseQuery, answers=PauseStatus)
RESUME = Operation(query=WeightsQuery, answers=PauseStatus)
IS_PAUSED = Operation(query=WeightsQuery)
UPDATE_WEIGHTS = Operation(UpdateWeightsBody, {}, Updated)
WEIGHT_INFO = Operation(query=WeightsQuery, answers=WeightInfo)
ABORT_REQUESTS = Operation(AbortBody, {}, PauseStatus)
RESET = Operation(query=WeightsQuery, answers=None)


async def pause(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Answers when the pause has begun. Unlike in vLLM, running requests are kept if no mode is given: a training loop
    that forgets the mode is not left with fragments."""
    query = read_object(context, dict(http.query_params), PauseQuery, {})
    waits = query.wait_for_inflight_requests in ("true", "1")
    client = await client_of(pool, context, query.model)
    await client.ask(Pause(query.mode or ("wait" if waits else PAUSE_KEEP)))
    return json_response(PauseStatus("paused"))


async def resume(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    query = read_object(context, dict(http.query_params), WeightsQuery, {})
    await (await client_of(pool, context, query.model)).ask(Resume())
    return json_response(PauseStatus("resumed"))


async def is_paused(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    query = read_object(context, dict(http.query_params), WeightsQuery, {})
    state = await (await client_of(pool, context, query.model)).ask(DescribeWeights())
    return json_response({"is_paused": state.paused})


async def update(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Answers when the weights are in place, between two steps."""
    body = await read_body(http, context, UpdateWeightsBody, {})
    if (body.path is None) == (body.update_info is None):
        raise InvalidRequest("name the new weights: send exactly one of path and update_info.path", param="path")
    path = body.path if body.update_info is None else body.update_info.path
    version, recompute = body.weight_version or "", body.recompute
    state = await update_weights(pool, context, body.model, path or "", version, recompute=recompute)
    return json_response(Updated(state.version, state.updates, state.path))


async def weight_info(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    query = read_object(context, dict(http.query_params), WeightsQuery, {})
    state = await (await client_of(pool, context, query.model)).ask(DescribeWeights())
    return json_response(WeightInfo(state.version, state.updates, state.path or None))


async def abort_requests(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Ends all requests of a model with what they have so far. Single ones end when their clients leave."""
    body = await read_body(http, context, AbortBody, {})
    if body.request_ids:
        raise InvalidRequest(
            "request_ids: this server does not know its clients' own ids of requests; close a request's connection to "
            "abort it, or leave the field out to abort all",
            param="request_ids",
        )
    await (await client_of(pool, context, body.model)).ask(AbortAll())
    return json_response(PauseStatus("aborted"))


async def reset_prefix_cache(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Empties the prefix cache; running requests keep the blocks that they hold."""
    query = read_object(context, dict(http.query_params), WeightsQuery, {})
    (await client_of(pool, context, query.model)).tell(FlushCache())
    return Response()

"""Serves SGLang's routes for training loops: pauses, and weights from a folder on the server's machine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import WeightsError
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import ANY_VALUE, NoEffect, body_of, read_body
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.pool import ModelPool
from penstock.server.models.served_model import ServedModel
from penstock.server.models.weights import client_of, update_weights
from penstock.types import PAUSE_ABORT, PAUSE_KEEP
from penstock.types.messages import AbortAll, DescribeWeights, Pause, Resume

UPDATE_NO_EFFECT: NoEffect = {
    "flush_cache": ANY_VALUE,  # KV of other weights is never reused
    "is_async": (False,),
    "load_format": ("auto", "safetensors", "gguf"),
    "manifest": ANY_VALUE,
    "recapture_cuda_graph": ANY_VALUE,  # weights keep their places, so graphs stay valid
    "token_step": ANY_VALUE,
    "torch_empty_cache": ANY_VALUE,
}
CONTINUE_NO_EFFECT: NoEffect = {"torch_empty_cache": ANY_VALUE}


class PauseGeneration(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Declares the fate of running requests. `in_place` and `retract` keep them; whether their KV is computed again is
    said by the update of weights that follows."""

    mode: Literal["abort", "retract", "in_place"] | None = None  # left out: in_place
    model: str | None = None  # left out: the first


class ContinueGeneration(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None  # left out: the first


class UpdateFromDisk(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model_path: Annotated[str, Meta(min_length=1)]
    abort_all_requests: bool = False
    weight_version: str | None = None  # left out: the number of the update
    keep_pause: bool = False  # the engine stays paused, if it was not
    recompute: bool = True  # KV of running requests is computed again; false: they keep the old KV
    model: str | None = None  # left out: the first


class SglangStatus(msgspec.Struct):
    message: str
    status: str = "ok"


class UpdateResult(msgspec.Struct):
    success: bool
    message: str
    num_paused_requests: int = 0
    weight_version: str | None = None


class SglangVersion(msgspec.Struct):
    weight_version: str


PAUSE = Operation(PauseGeneration, {}, SglangStatus)
CONTINUE = Operation(ContinueGeneration, CONTINUE_NO_EFFECT, SglangStatus)
UPDATE = Operation(UpdateFromDisk, UPDATE_NO_EFFECT, UpdateResult)
VERSION = Operation(answers=SglangVersion)


async def pause_generation(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Answers when the pause has begun. Unlike in SGLang, running requests are kept if no mode is given."""
    body = PauseGeneration()
    if await body_of(http, context):
        body = await read_body(http, context, PauseGeneration, {})
    client = await client_of(pool, context, body.model)
    await client.ask(Pause(PAUSE_ABORT if body.mode == "abort" else PAUSE_KEEP))
    return json_response(SglangStatus("Generation paused successfully."))


async def continue_generation(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    body = ContinueGeneration()
    if await body_of(http, context):
        body = await read_body(http, context, ContinueGeneration, CONTINUE_NO_EFFECT)
    await (await client_of(pool, context, body.model)).ask(Resume())
    return json_response(SglangStatus("Generation continued successfully."))


async def update_from_disk(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Answers when the weights are in place, between two steps; with `success: false` and status 400 if they do not
    fit."""
    body = await read_body(http, context, UpdateFromDisk, UPDATE_NO_EFFECT)
    client = await client_of(pool, context, body.model)
    if body.abort_all_requests:
        await client.ask(AbortAll())
    version, recompute = body.weight_version or "", body.recompute
    try:
        state = await update_weights(pool, context, body.model, body.model_path, version, recompute=recompute)
    except WeightsError as error:
        return json_response(UpdateResult(False, error.message), status=400)
    if body.keep_pause:
        await client.ask(Pause())
    waiting = client.stats.running + client.stats.waiting if client.weights.paused else 0
    return json_response(UpdateResult(True, "Succeeded to update model weights.", waiting, state.version))


async def weight_version(served: ServedModel, _: HttpRequest, __: RequestContext) -> Response:
    return json_response(SglangVersion((await served.client.ask(DescribeWeights())).version))

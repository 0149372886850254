"""Serves SGLang's /load_lora_adapter and /unload_lora_adapter."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.config import AdapterOption
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import NoEffect, read_body
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.adapters import register, unregister
from penstock.server.models.pool import ModelPool

NO_EFFECT: NoEffect = {
    "added_tokens_config": ({},),
    "pinned": (False,),  # no adapter is: the least recently used one makes room
}


class SglangLoadAdapter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    lora_name: Annotated[str, Meta(min_length=1)]
    lora_path: Annotated[str, Meta(min_length=1)]
    model: str | None = None  # default: the first


class SglangUnloadAdapter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    lora_name: str
    model: str | None = None  # left out: the one that has the adapter


class SglangAdapters(msgspec.Struct):
    loaded_adapters: dict[str, str]  # paths by name, of all models
    success: bool = True
    error_message: str = ""


LOAD_ADAPTER = Operation(SglangLoadAdapter, NO_EFFECT, SglangAdapters)
UNLOAD_ADAPTER = Operation(SglangUnloadAdapter, {}, SglangAdapters)


async def load_adapter(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, SglangLoadAdapter, NO_EFFECT)
    await register(pool, context, body.model, AdapterOption(body.lora_name, body.lora_path))
    return json_response(_loaded(pool))


async def unload_adapter(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, SglangUnloadAdapter, {})
    await unregister(pool, body.lora_name, body.model)
    return json_response(_loaded(pool))


def _loaded(pool: ModelPool) -> SglangAdapters:
    return SglangAdapters({each.name: each.path for entry in pool.models.entries for each in entry.listed_adapters})

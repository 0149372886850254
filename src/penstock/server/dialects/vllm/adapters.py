"""Serves vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from penstock.config import AdapterOption
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_body
from penstock.server.http.openapi import Operation
from penstock.server.models.adapters import register, unregister
from penstock.server.models.pool import ModelPool

UNLOAD_NO_EFFECT: NoEffect = {"lora_int_id": ANY_VALUE}  # an adapter is known by its name


class LoadAdapter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    lora_name: Annotated[str, Meta(min_length=1)]
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool = False  # an adapter of the same name is replaced
    model: str | None = None  # default: the first


class UnloadAdapter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    lora_name: str
    model: str | None = None  # left out: the one that has the adapter


LOAD_ADAPTER = Operation(LoadAdapter, {}, "text/plain")
UNLOAD_ADAPTER = Operation(UnloadAdapter, UNLOAD_NO_EFFECT, "text/plain")


async def load_adapter(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, LoadAdapter, {})
    option = AdapterOption(body.lora_name, body.lora_path)
    await register(pool, context, body.model, option, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Answers at once: requests that have begun keep the adapter to their end."""
    body = await read_body(http, context, UnloadAdapter, UNLOAD_NO_EFFECT)
    await unregister(pool, body.lora_name, body.model)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

"""Serves what llama.cpp's clients read about the server: /props and /slots."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import __version__
from penstock.errors import EngineUnavailable, NotFound, NotSupported
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.llamacpp.fields import settings_of
from penstock.server.http.bodies import read_body, read_object
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.pool import ModelPool
from penstock.server.models.served_model import ServedModel

BUILD_INFO = f"b0-penstock-{__version__}"  # llama.cpp's clients expect b, a number and a commit


class ChangedProps(msgspec.Struct, forbid_unknown_fields=True):
    """Is empty: nothing can be changed."""


class SlotQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    fail_on_no_slot: Literal["0", "1"] | None = None
    model: str | None = None


class SlotAction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    action: Literal["erase"]


PROPS = Operation()
CHANGE_PROPS = Operation(ChangedProps, {})
SLOTS = Operation(query=SlotQuery)
SLOT_ACTION = Operation(query=SlotAction)


async def props(served: ServedModel, _: HttpRequest, __: RequestContext) -> Response:
    limits, text = served.limits, served.text
    names = text.tokenizer.names
    settings = msgspec.to_builtins(settings_of(served, text.sampling()))
    return json_response(
        {
            "default_generation_settings": {"params": settings, "n_ctx": limits.max_len},
            "total_slots": limits.max_rows,
            "model_alias": served.name,
            "model_path": "" if served.path is None else str(served.path),
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": text.chat_template.source,
            "chat_template_is_default": text.template is None,
            "bos_token": names.get("bos_token", ""),
            "eos_token": names.get("eos_token", ""),
            "build_info": BUILD_INFO,
            "is_sleeping": False,
        }
    )


async def change_props(_: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    await read_body(http, context, ChangedProps, {})
    return json_response({"success": True})


async def slots(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    """Returns a slot for each row of a step. Requests belong to no particular slot, so the first n are busy while n
    requests run."""
    query = read_object(context, dict(http.query_params), SlotQuery, {}, strict=False)
    limits, running, speculative = served.limits, served.client.stats.running, served.draft_tokens > 0
    if query.fail_on_no_slot == "1" and running >= limits.max_rows:
        raise EngineUnavailable(f"no slot is idle: {running} requests run (the limit)")
    return json_response(
        [
            {"id": slot, "n_ctx": limits.max_len, "speculative": speculative, "is_processing": slot < running}
            for slot in range(limits.max_rows)
        ]
    )


async def change_slot(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    """Answers that a slot was erased, because none holds anything beyond its request."""
    if (action := http.query_params.get("action")) in ("save", "restore"):
        raise NotSupported(
            f"a slot cannot {action} its cache: every prefix is cached, for all requests, while there is room"
        )
    read_object(context, dict(http.query_params), SlotAction, {}, strict=False)
    id = http.path_params["id"]
    if not id.isdecimal() or int(id) >= served.limits.max_rows:
        raise NotFound(f"there is no slot {id!r}: slots are from 0 to {served.limits.max_rows - 1}")
    return json_response({"id_slot": int(id), "n_erased": 0})

"""Answers questions about the server itself: its models, its health and its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import EngineUnavailable
from penstock.ipc.client import EngineClient, EngineState
from penstock.server.access.authentication import wants_generation
from penstock.server.access.rights import Right, check_right
from penstock.server.context.request_context import RequestContext
from penstock.server.http.sse import json_response
from penstock.server.models.entry import ModelEntry
from penstock.server.models.pool import ModelPool
from penstock.server.models.visible import may_see, may_use, unknown_model
from penstock.types import Hello


async def list_models(pool: ModelPool, _: Request, context: RequestContext) -> Response:
    """Returns one object for both SDKs that read this route: OpenAI's and Anthropic's read the fields they know.
    Aliases given at startup are listed after the models' own names, unless they have wildcards."""
    data = [model for _, model in listed(pool, context)] + _foreign(pool, context)
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"has_more": False}
    return json_response({"object": "list", "data": data} | page)


def listed(pool: ModelPool, context: RequestContext) -> list[tuple[ModelEntry, dict[str, Any]]]:
    """Returns every model that the request's key may use, by each of its names."""
    return [(entry, _model(pool, entry, name)) for name, entry in pool.models.listed() if may_see(context, entry)]


async def show_model(pool: ModelPool, request: Request, context: RequestContext) -> Response:
    name = request.path_params["id"]
    if (foreign := pool.models.foreign_model(name, context)) is not None:
        context.caller.check_allowed(foreign)
        return json_response(_foreign_model(pool, foreign))
    entry = pool.models.get(name, context)
    context.caller.check_allowed(entry.name)
    if not context.caller.may_see(pool.models.derived(entry, name)):
        raise unknown_model(pool.models, context, name)
    if adapter := entry.adapter_named(name):
        return json_response(_model(pool, entry, adapter))
    if name != entry.name:
        context.notes.stood_in = entry.name
    return json_response(_model(pool, entry, entry.name))


def _foreign(pool: ModelPool, context: RequestContext) -> list[dict[str, Any]]:
    models = [] if pool.foreign is None else pool.foreign.models()
    own = {name for name, _ in pool.models.listed()}
    return [
        _foreign_model(pool, model.name) for model in models if model.name not in own and may_use(context, model.name)
    ]


def _foreign_model(pool: ModelPool, name: str) -> dict[str, Any]:
    """Returns a model of other engines as it is listed; its owners are their kinds."""
    models = [] if pool.foreign is None else pool.foreign.models()
    kinds = [kind for model in models if model.name == name for kind in model.kinds]
    return _listed_as(pool, name, ", ".join(kinds))


async def hello(_: ModelPool, __: Request, ___: RequestContext) -> Response:
    """Answers the request by which Claude Code finds out whether it can reach a server."""
    return json_response({"message": "hello"})


async def health(pool: ModelPool, http: Request, context: RequestContext) -> Response:
    """Reports on the default model's engine or, in a fleet, on its `replicas`; on other `engines`; and in `models` on
    all models that the request may see. Without a required key it returns only the status. With `generate=1`, which
    needs a key, every awake engine first generates a token."""
    pool.models.refresh()
    if generate := wants_generation(http.scope):
        check_right(Right.USE, "generate=1", context.caller.payer, context.caller.page)
    entries = [entry for entry in pool.models.entries if may_see(context, entry)]
    models = [state_of(entry) for entry in entries]
    fleet = _replicas(next((client for _, client in pool.models.clients()), None))
    fleet |= {} if pool.foreign is None else {"engines": pool.foreign.engines()}
    try:
        pool.models.check_health()
        if generate:
            await _generate(pool, entries, models)
    except EngineUnavailable as error:
        lost = (client.state for _, client in pool.models.clients() if client.state is not EngineState.READY)
        failed = {"status": next(lost, EngineState.FAILED), "engine": None, "message": error.message, "models": models}
        return _health(context, failed | fleet, 503)
    first = next(pool.models.clients(), None)
    engine = None
    if first is not None and first[1].hello is not None and any(entry.name == first[0] for entry in entries):
        engine = {"pid": first[1].hello.pid, "model": first[0], **_unknown_fields(first[1].hello)}
    down = not pool.models.entries and not any(each["state"] == EngineState.READY for each in fleet.get("engines", ()))
    down = down and pool.foreign is not None
    status = EngineState.FAILED if down else "ok"
    return _health(context, {"status": status, "engine": engine, "models": models} | fleet, 503 if down else 200)


def _health(context: RequestContext, told: dict[str, Any], code: int) -> Response:
    return json_response({"status": told["status"]} if context.caller.anonymous else told, code)


async def _generate(pool: ModelPool, entries: Sequence[ModelEntry], models: Sequence[dict[str, Any]]) -> None:
    """Generates a token on every engine that is awake, and records in `models` whose token it was: the probe's or
    another request's."""
    probed = [(model, entry.awake.client) for model, entry in zip(models, entries, strict=True) if entry.awake]
    found = await asyncio.gather(*(pool.probes.check(client) for _, client in probed))
    for (model, _), generated in zip(probed, found, strict=True):
        model["generated"] = generated


async def show_metrics(pool: ModelPool, _: Request, __: RequestContext) -> Response:
    started = {"process-start-time-unix": str(pool.created)}  # llama.cpp's name and form
    return Response(await pool.metrics.render(), headers=started, media_type="text/plain; version=0.0.4; charset=utf-8")


def state_of(entry: ModelEntry) -> dict[str, Any]:
    hello = entry.served.client.hello if entry.served else None
    told = {"name": entry.name, "state": str(entry.state), "pid": hello.pid if hello else None, "bytes": entry.bytes}
    told |= {"host_bytes": entry.host_bytes} if entry.host_bytes else {}
    told |= _replicas(entry.served.client if entry.served else None)
    return told | ({"error": entry.error} if entry.error else {}) | (_unknown_fields(hello) if hello else {})


def _replicas(client: EngineClient | None) -> dict[str, Any]:
    """Returns the engines of a fleet, how many wait for them and how many there are to be; nothing if there is one
    engine."""
    told = [
        {"name": each.name, "pid": each.pid or None, "state": str(each.state), "epoch": each.epoch}
        | ({"reason": each.reason} if each.reason else {})
        for each in (client.replicas if client is not None else ())
    ]
    if not told:
        return {}
    figures = client.fleet_figures if client is not None else None
    scale = None if figures is None or figures.scale is None else figures.scale._asdict()
    waiting = {} if figures is None else {"waiting": figures.waiting}
    return {"replicas": told} | waiting | ({} if scale is None else {"scale": scale})


def _unknown_fields(hello: Hello) -> dict[str, Any]:
    """Returns the fields of the model's config.json that nothing is known of, if there are any."""
    return {"unknown_fields": hello.unknown_fields} if hello.unknown_fields else {}


def _model(pool: ModelPool, entry: ModelEntry, name: str) -> dict[str, Any]:
    openai = _listed_as(pool, name, "penstock") | model_fields(entry, pool.created)
    if adapter := entry.adapters.get(name):
        openai |= {"root": adapter.path, "parent": entry.name}
    return openai


def _listed_as(pool: ModelPool, name: str, owner: str) -> dict[str, Any]:
    """Returns the fields that OpenAI's and Anthropic's clients read of any model."""
    openai = {"id": name, "object": "model", "created": pool.created, "owned_by": owner}
    created = datetime.fromtimestamp(pool.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return openai | {"type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}


def model_fields(entry: ModelEntry, created: int) -> dict[str, Any]:
    """Returns the fields that vLLM adds to an entry of /v1/models. The length is null while no engine runs."""
    hello = entry.served.client.hello if entry.served else None
    return {
        "root": entry.name,
        "parent": None,
        "max_model_len": None if hello is None else hello.limits.max_len,
        "permission": [
            {
                "id": f"modelperm-{entry.name}",
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }

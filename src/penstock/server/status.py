"""Answers questions about the server itself: its models, its health and its metrics."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.request_context import RequestContext
from penstock.server.served_model import CLIENTS_NAMES, ServedModel
from penstock.server.sse import json_response
from penstock.server.vllm.endpoints import model_fields


async def list_models(served: ServedModel, _: Request, __: RequestContext) -> Response:
    """Returns one object for both SDKs that read this route: OpenAI's and Anthropic's read the fields they know.
    Aliases that the server was started with are listed beside the model's own name, unless they have wildcards."""
    aliases = [name for name in served.aliases if name not in CLIENTS_NAMES and not set(name) & set("*?[")]
    data = [_model(served), *(_model(served) | {"id": alias, "display_name": alias} for alias in aliases)]
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return json_response({"object": "list", "data": data} | page)


async def show_model(served: ServedModel, request: Request, context: RequestContext) -> Response:
    served.check_model(request.path_params["id"], context)
    return json_response(_model(served))


async def hello(_: ServedModel, __: Request, ___: RequestContext) -> Response:
    """Answers the request by which Claude Code finds out whether it can reach a server."""
    return json_response({"message": "hello"})


async def health(served: ServedModel, _: Request, __: RequestContext) -> Response:
    hello = served.client.hello
    if hello is None:
        return json_response(
            {"status": "unavailable", "engine": None, "message": served.client.unavailable_reason}, 503
        )
    unknown = {"unknown_fields": hello.unknown_fields} if hello.unknown_fields else {}
    return json_response({"status": "ok", "engine": {"pid": hello.pid, "model": served.name, **unknown}})


async def show_metrics(served: ServedModel, _: Request, __: RequestContext) -> Response:
    started = {"process-start-time-unix": str(served.created)}  # as llama.cpp's server says it
    return Response(served.metrics.render(), headers=started, media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(served: ServedModel) -> dict[str, object]:
    openai = {"id": served.name, "object": "model", "created": served.created, "owned_by": "penstock"}
    openai |= model_fields(served)
    created = datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return openai | {"type": "model", "display_name": served.name, "created_at": created, "lifecycle": "active"}

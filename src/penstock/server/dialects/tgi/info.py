"""Serves GET /info: facts about the server and its model."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import __version__
from penstock.server.access.bounds import MAX_STOPS
from penstock.server.context.request_context import RequestContext
from penstock.server.http.sse import json_response
from penstock.server.models.served_model import ServedModel


async def info(served: ServedModel, _: HttpRequest, __: RequestContext) -> Response:
    limits = served.limits
    return json_response(
        {
            "model_id": served.name,
            "model_sha": None,
            "model_pipeline_tag": "feature-extraction" if served.encoder else "text-generation",
            "max_concurrent_requests": limits.max_rows,
            "max_best_of": 128,
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": limits.max_len - 1,
            "max_total_tokens": limits.max_len,
            "max_batch_total_tokens": limits.num_blocks * limits.block_size,
            "max_client_batch_size": 1,
            "router": "penstock",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )

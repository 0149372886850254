"""Lists the routes of KServe's protocol and of Triton's generate extension."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.kserve.endpoints import (
    GENERATE,
    GENERATE_STREAM,
    generate,
    generate_stream,
    live,
    model_metadata,
    model_ready,
    ready,
    server_metadata,
)
from penstock.server.http.endpoint import EMPTY, RouteEntry, ServerRouteEntry

MODEL = "/v2/models/{model:path}"
VERSION = MODEL + "/versions/{version}"

ROUTES = (  # a model's name may have slashes, so a path that ends in it comes after those that are longer
    RouteEntry("POST", f"{VERSION}/generate", generate, GENERATE),
    RouteEntry("POST", f"{VERSION}/generate_stream", generate_stream, GENERATE_STREAM),
    RouteEntry("POST", f"{MODEL}/generate", generate, GENERATE),
    RouteEntry("POST", f"{MODEL}/generate_stream", generate_stream, GENERATE_STREAM),
    ServerRouteEntry("GET", "/v2", server_metadata, right=Right.READ),
    ServerRouteEntry("GET", "/v2/health/live", live, EMPTY, right=Right.READ),
    ServerRouteEntry("GET", "/v2/health/ready", ready, EMPTY, right=Right.READ),
    RouteEntry("GET", f"{VERSION}/ready", model_ready, EMPTY),
    RouteEntry("GET", VERSION, model_metadata),
    RouteEntry("GET", f"{MODEL}/ready", model_ready, EMPTY),
    RouteEntry("GET", MODEL, model_metadata),
)

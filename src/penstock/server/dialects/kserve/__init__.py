"""Serves the KServe v2 protocol, with Triton's generate extension."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.kserve.errors import KSERVE_ERRORS
from penstock.server.http.endpoint import EMPTY, Dialect, RouteEntry, ServerRouteEntry

MODEL = "/v2/models/{model:path}"
VERSION = MODEL + "/versions/{version}"

ROUTES = (  # longer paths first, because a model's name may have slashes
    RouteEntry("POST", f"{VERSION}/generate", ".endpoints:generate", ".endpoints:GENERATE"),
    RouteEntry("POST", f"{VERSION}/generate_stream", ".endpoints:generate_stream", ".endpoints:GENERATE_STREAM"),
    RouteEntry("POST", f"{MODEL}/generate", ".endpoints:generate", ".endpoints:GENERATE"),
    RouteEntry("POST", f"{MODEL}/generate_stream", ".endpoints:generate_stream", ".endpoints:GENERATE_STREAM"),
    ServerRouteEntry("GET", "/v2", ".endpoints:server_metadata", right=Right.READ),
    ServerRouteEntry("GET", "/v2/health/live", ".endpoints:live", EMPTY, right=Right.READ),
    ServerRouteEntry("GET", "/v2/health/ready", ".endpoints:ready", EMPTY, right=Right.READ),
    RouteEntry("GET", f"{VERSION}/ready", ".endpoints:model_ready", EMPTY),
    RouteEntry("GET", VERSION, ".endpoints:model_metadata"),
    RouteEntry("GET", f"{MODEL}/ready", ".endpoints:model_ready", EMPTY),
    RouteEntry("GET", MODEL, ".endpoints:model_metadata"),
)
DIALECT = Dialect(
    "kserve",
    __name__,
    ROUTES,
    title="KServe",
    errors=KSERVE_ERRORS,
    error_paths=("/v2/models",),
    metrics={"nv": ".metrics:names"},
)

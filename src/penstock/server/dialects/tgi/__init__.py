"""Serves the routes of Text Generation Inference."""

from __future__ import annotations

from penstock.server.dialects.tgi.errors import TGI_ERRORS
from penstock.server.http.endpoint import Dialect, RouteEntry

ROUTES = (
    RouteEntry("POST", "/generate", ".generate:generate", ".generate:GENERATE", fields=("inputs",)),
    RouteEntry("POST", "/", ".generate:generate_compat", ".generate:GENERATE_COMPAT"),
    RouteEntry("POST", "/generate_stream", ".generate:generate_stream", ".generate:GENERATE_STREAM"),
    RouteEntry("GET", "/info", ".info:info"),
)
DIALECT = Dialect(
    "tgi",
    __name__,
    ROUTES,
    title="Text Generation Inference",
    errors=TGI_ERRORS,
    error_paths=("/", "/generate_stream"),
    metrics={"tgi": ".metrics:names"},
)

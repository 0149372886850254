"""Lists the routes of Text Generation Inference. It shares /generate with SGLang."""

from __future__ import annotations

from penstock.server.dialects.tgi.generate import GENERATE_COMPAT, GENERATE_STREAM, generate_compat, generate_stream
from penstock.server.dialects.tgi.info import info
from penstock.server.http.endpoint import RouteEntry

ROUTES = (
    RouteEntry("POST", "/", generate_compat, GENERATE_COMPAT),
    RouteEntry("POST", "/generate_stream", generate_stream, GENERATE_STREAM),
    RouteEntry("GET", "/info", info),
)

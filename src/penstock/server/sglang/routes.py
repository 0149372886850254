"""Lists the routes of SGLang. It shares /generate with Text Generation Inference."""

from __future__ import annotations

from penstock.server.endpoint import EMPTY, TEXT, RouteEntry
from penstock.server.generate import GENERATE, generate
from penstock.server.sglang.endpoints import (
    ENCODE,
    encode_texts,
    flush_cache,
    health_generate,
    model_info,
    server_info,
)

ROUTES = (
    RouteEntry("POST", "/generate", generate, GENERATE),
    RouteEntry("POST", "/encode", encode_texts, ENCODE),
    RouteEntry("POST", "/flush_cache", flush_cache, TEXT),
    RouteEntry("GET", "/flush_cache", flush_cache, TEXT),
    RouteEntry("GET", "/health_generate", health_generate, EMPTY),
    RouteEntry("GET", "/get_model_info", model_info),
    RouteEntry("GET", "/model_info", model_info),
    RouteEntry("GET", "/get_server_info", server_info),
    RouteEntry("GET", "/server_info", server_info),
)

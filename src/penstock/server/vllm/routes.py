"""Lists the routes that vLLM adds to OpenAI's."""

from __future__ import annotations

from penstock.server.endpoint import EMPTY, RouteEntry
from penstock.server.vllm.endpoints import POOLING, load, ping, pooling, tokenizer_info, version

ROUTES = (
    RouteEntry("POST", "/pooling", pooling, POOLING),
    RouteEntry("POST", "/ping", ping, EMPTY),
    RouteEntry("GET", "/ping", ping, EMPTY),
    RouteEntry("GET", "/version", version),
    RouteEntry("GET", "/load", load),
    RouteEntry("GET", "/tokenizer_info", tokenizer_info),
)

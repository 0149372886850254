"""Lists the routes that vLLM adds to OpenAI's."""

from __future__ import annotations

from penstock.server.endpoint import EMPTY, RouteEntry, ServerRouteEntry
from penstock.server.vllm.endpoints import POOLING, load, ping, pooling, tokenizer_info, version
from penstock.server.vllm.sleeping import SLEEP, SLEEPING, WAKE_UP, is_sleeping, sleep, wake_up

ROUTES = (
    RouteEntry("POST", "/pooling", pooling, POOLING),
    ServerRouteEntry("POST", "/ping", ping, EMPTY),
    ServerRouteEntry("GET", "/ping", ping, EMPTY),
    ServerRouteEntry("GET", "/version", version),
    ServerRouteEntry("GET", "/load", load),
    RouteEntry("GET", "/tokenizer_info", tokenizer_info),
    ServerRouteEntry("POST", "/sleep", sleep, SLEEP),
    ServerRouteEntry("POST", "/wake_up", wake_up, WAKE_UP),
    ServerRouteEntry("GET", "/is_sleeping", is_sleeping, SLEEPING),
)

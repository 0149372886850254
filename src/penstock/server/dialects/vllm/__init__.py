"""Serves the routes that vLLM adds to OpenAI's."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.http.endpoint import EMPTY, Dialect, RouteEntry, ServerRouteEntry

ROUTES = (
    RouteEntry("POST", "/pooling", ".endpoints:pooling", ".endpoints:POOLING"),
    ServerRouteEntry("POST", "/ping", ".endpoints:ping", EMPTY),
    ServerRouteEntry("GET", "/ping", ".endpoints:ping", EMPTY, right=Right.READ),
    ServerRouteEntry("GET", "/version", ".endpoints:version", right=Right.READ),
    ServerRouteEntry("GET", "/load", ".endpoints:load", right=Right.READ),
    RouteEntry("GET", "/tokenizer_info", ".endpoints:tokenizer_info"),
    ServerRouteEntry(
        "POST", "/v1/load_lora_adapter", ".adapters:load_adapter", ".adapters:LOAD_ADAPTER", right=Right.ADMIN
    ),
    ServerRouteEntry(
        "POST", "/v1/unload_lora_adapter", ".adapters:unload_adapter", ".adapters:UNLOAD_ADAPTER", right=Right.ADMIN
    ),
    ServerRouteEntry("POST", "/sleep", ".sleeping:sleep", ".sleeping:SLEEP", right=Right.ADMIN),
    ServerRouteEntry("POST", "/wake_up", ".sleeping:wake_up", ".sleeping:WAKE_UP", right=Right.ADMIN),
    ServerRouteEntry("GET", "/is_sleeping", ".sleeping:is_sleeping", ".sleeping:SLEEPING", right=Right.READ),
    ServerRouteEntry("POST", "/pause", ".weights:pause", ".weights:PAUSE", right=Right.ADMIN),
    ServerRouteEntry("POST", "/resume", ".weights:resume", ".weights:RESUME", right=Right.ADMIN),
    ServerRouteEntry("GET", "/is_paused", ".weights:is_paused", ".weights:IS_PAUSED"),
    ServerRouteEntry("POST", "/update_weights", ".weights:update", ".weights:UPDATE_WEIGHTS", right=Right.ADMIN),
    ServerRouteEntry("GET", "/weight_info", ".weights:weight_info", ".weights:WEIGHT_INFO"),
    ServerRouteEntry(
        "POST", "/abort_requests", ".weights:abort_requests", ".weights:ABORT_REQUESTS", right=Right.ADMIN
    ),
    ServerRouteEntry("POST", "/reset_prefix_cache", ".weights:reset_prefix_cache", ".weights:RESET", right=Right.ADMIN),
)
DIALECT = Dialect("vllm", __name__, ROUTES, title="vLLM", metrics={"vllm": ".metrics:names"})

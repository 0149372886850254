"""Lists the routes that vLLM adds to OpenAI's."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.vllm.adapters import LOAD_ADAPTER, UNLOAD_ADAPTER, load_adapter, unload_adapter
from penstock.server.dialects.vllm.endpoints import POOLING, load, ping, pooling, tokenizer_info, version
from penstock.server.dialects.vllm.sleeping import SLEEP, SLEEPING, WAKE_UP, is_sleeping, sleep, wake_up
from penstock.server.dialects.vllm.weights import (
    ABORT_REQUESTS,
    IS_PAUSED,
    PAUSE,
    RESET,
    RESUME,
    UPDATE_WEIGHTS,
    WEIGHT_INFO,
    abort_requests,
    is_paused,
    pause,
    reset_prefix_cache,
    resume,
    update,
    weight_info,
)
from penstock.server.http.endpoint import EMPTY, RouteEntry, ServerRouteEntry

ROUTES = (
    RouteEntry("POST", "/pooling", pooling, POOLING),
    ServerRouteEntry("POST", "/ping", ping, EMPTY),
    ServerRouteEntry("GET", "/ping", ping, EMPTY, right=Right.READ),
    ServerRouteEntry("GET", "/version", version, right=Right.READ),
    ServerRouteEntry("GET", "/load", load, right=Right.READ),
    RouteEntry("GET", "/tokenizer_info", tokenizer_info),
    ServerRouteEntry("POST", "/v1/load_lora_adapter", load_adapter, LOAD_ADAPTER, right=Right.ADMIN),
    ServerRouteEntry("POST", "/v1/unload_lora_adapter", unload_adapter, UNLOAD_ADAPTER, right=Right.ADMIN),
    ServerRouteEntry("POST", "/sleep", sleep, SLEEP, right=Right.ADMIN),
    ServerRouteEntry("POST", "/wake_up", wake_up, WAKE_UP, right=Right.ADMIN),
    ServerRouteEntry("GET", "/is_sleeping", is_sleeping, SLEEPING, right=Right.READ),
    ServerRouteEntry("POST", "/pause", pause, PAUSE, right=Right.ADMIN),
    ServerRouteEntry("POST", "/resume", resume, RESUME, right=Right.ADMIN),
    ServerRouteEntry("GET", "/is_paused", is_paused, IS_PAUSED),
    ServerRouteEntry("POST", "/update_weights", update, UPDATE_WEIGHTS, right=Right.ADMIN),
    ServerRouteEntry("GET", "/weight_info", weight_info, WEIGHT_INFO),
    ServerRouteEntry("POST", "/abort_requests", abort_requests, ABORT_REQUESTS, right=Right.ADMIN),
    ServerRouteEntry("POST", "/reset_prefix_cache", reset_prefix_cache, RESET, right=Right.ADMIN),
)

"""Serves the routes of SGLang."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.http.endpoint import EMPTY, TEXT, Dialect, RouteEntry, ServerRouteEntry

ROUTES = (
    RouteEntry("POST", "/generate", ".generate:generate", ".generate:GENERATE", fields=("text", "input_ids")),
    RouteEntry("POST", "/encode", ".endpoints:encode_texts", ".endpoints:ENCODE"),
    RouteEntry("POST", "/flush_cache", ".endpoints:flush_cache", TEXT, right=Right.ADMIN),
    RouteEntry("GET", "/flush_cache", ".endpoints:flush_cache", TEXT, right=Right.ADMIN),
    ServerRouteEntry(
        "POST", "/load_lora_adapter", ".adapters:load_adapter", ".adapters:LOAD_ADAPTER", right=Right.ADMIN
    ),
    ServerRouteEntry(
        "POST", "/unload_lora_adapter", ".adapters:unload_adapter", ".adapters:UNLOAD_ADAPTER", right=Right.ADMIN
    ),
    RouteEntry("GET", "/health_generate", ".endpoints:health_generate", EMPTY),
    RouteEntry("GET", "/get_model_info", ".endpoints:model_info"),
    RouteEntry("GET", "/model_info", ".endpoints:model_info"),
    ServerRouteEntry("POST", "/pause_generation", ".weights:pause_generation", ".weights:PAUSE", right=Right.ADMIN),
    ServerRouteEntry(
        "POST", "/continue_generation", ".weights:continue_generation", ".weights:CONTINUE", right=Right.ADMIN
    ),
    ServerRouteEntry(
        "POST", "/update_weights_from_disk", ".weights:update_from_disk", ".weights:UPDATE", right=Right.ADMIN
    ),
    RouteEntry("GET", "/weight_version", ".weights:weight_version", ".weights:VERSION"),
    RouteEntry("GET", "/get_weight_version", ".weights:weight_version", ".weights:VERSION"),
    RouteEntry("GET", "/get_server_info", ".endpoints:server_info"),
    RouteEntry("GET", "/server_info", ".endpoints:server_info"),
)
DIALECT = Dialect("sglang", __name__, ROUTES, title="SGLang", metrics={"sglang": ".metrics:names"})

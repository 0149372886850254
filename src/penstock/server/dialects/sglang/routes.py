"""Lists the routes of SGLang. It shares /generate with Text Generation Inference."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.generate import GENERATE, generate
from penstock.server.dialects.sglang.adapters import LOAD_ADAPTER, UNLOAD_ADAPTER, load_adapter, unload_adapter
from penstock.server.dialects.sglang.endpoints import (
    ENCODE,
    encode_texts,
    flush_cache,
    health_generate,
    model_info,
    server_info,
)
from penstock.server.dialects.sglang.weights import (
    CONTINUE,
    PAUSE,
    UPDATE,
    VERSION,
    continue_generation,
    pause_generation,
    update_from_disk,
    weight_version,
)
from penstock.server.http.endpoint import EMPTY, TEXT, RouteEntry, ServerRouteEntry

ROUTES = (
    RouteEntry("POST", "/generate", generate, GENERATE),
    RouteEntry("POST", "/encode", encode_texts, ENCODE),
    RouteEntry("POST", "/flush_cache", flush_cache, TEXT, right=Right.ADMIN),
    RouteEntry("GET", "/flush_cache", flush_cache, TEXT, right=Right.ADMIN),
    ServerRouteEntry("POST", "/load_lora_adapter", load_adapter, LOAD_ADAPTER, right=Right.ADMIN),
    ServerRouteEntry("POST", "/unload_lora_adapter", unload_adapter, UNLOAD_ADAPTER, right=Right.ADMIN),
    RouteEntry("GET", "/health_generate", health_generate, EMPTY),
    RouteEntry("GET", "/get_model_info", model_info),
    RouteEntry("GET", "/model_info", model_info),
    ServerRouteEntry("POST", "/pause_generation", pause_generation, PAUSE, right=Right.ADMIN),
    ServerRouteEntry("POST", "/continue_generation", continue_generation, CONTINUE, right=Right.ADMIN),
    ServerRouteEntry("POST", "/update_weights_from_disk", update_from_disk, UPDATE, right=Right.ADMIN),
    RouteEntry("GET", "/weight_version", weight_version, VERSION),
    RouteEntry("GET", "/get_weight_version", weight_version, VERSION),
    RouteEntry("GET", "/get_server_info", server_info),
    RouteEntry("GET", "/server_info", server_info),
)

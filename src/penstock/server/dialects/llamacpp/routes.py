"""Lists the routes of llama.cpp's server: its own ones, and unversioned names of OpenAI's."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.dialects.llamacpp.adapters import LIST_ADAPTERS, SCALE_ADAPTERS, list_adapters, scale_adapters
from penstock.server.dialects.llamacpp.completion import COMPLETION, completion
from penstock.server.dialects.llamacpp.embedding import EMBEDDING, embedding
from penstock.server.dialects.llamacpp.infill import INFILL, infill
from penstock.server.dialects.llamacpp.models import NAMED, list_with_status, load, unload
from penstock.server.dialects.llamacpp.server_state import (
    CHANGE_PROPS,
    PROPS,
    SLOT_ACTION,
    SLOTS,
    change_props,
    change_slot,
    props,
    slots,
)
from penstock.server.generation.tokens import APPLY_TEMPLATE, count_chat_tokens
from penstock.server.http.endpoint import RouteEntry, ServerRouteEntry
from penstock.server.status.endpoints import health

ROUTES = (
    RouteEntry("POST", "/completion", completion, COMPLETION),
    RouteEntry("POST", "/completions", completion, COMPLETION),
    RouteEntry("POST", "/infill", infill, INFILL),
    RouteEntry("POST", "/embedding", embedding, EMBEDDING),
    RouteEntry("POST", "/embeddings", embedding, EMBEDDING),
    RouteEntry("POST", "/chat/completions/input_tokens", count_chat_tokens, APPLY_TEMPLATE),
    RouteEntry("POST", "/v1/chat/completions/input_tokens", count_chat_tokens, APPLY_TEMPLATE),
    ServerRouteEntry("POST", "/props", change_props, CHANGE_PROPS),
    RouteEntry("GET", "/props", props, PROPS),
    RouteEntry("GET", "/slots", slots, SLOTS),
    RouteEntry("POST", "/slots/{id}", change_slot, SLOT_ACTION),
    ServerRouteEntry("GET", "/lora-adapters", list_adapters, LIST_ADAPTERS, right=Right.READ),
    ServerRouteEntry("POST", "/lora-adapters", scale_adapters, SCALE_ADAPTERS, right=Right.ADMIN),
    ServerRouteEntry("GET", "/v1/health", health, right=Right.READ),
    ServerRouteEntry("GET", "/models", list_with_status, right=Right.READ),
    ServerRouteEntry("POST", "/models/load", load, NAMED, right=Right.ADMIN),
    ServerRouteEntry("POST", "/models/unload", unload, NAMED, right=Right.ADMIN),
)

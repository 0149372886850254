"""Writes errors as llama.cpp does."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from penstock.errors import ContextTooLong
from penstock.server.http.errors import ErrorShape, Refusal

LLAMACPP_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
PATHS = (  # used by llama.cpp's clients only
    "/apply-template",
    "/chat/",
    "/completion",
    "/embedding",
    "/infill",
    "/lora-adapters",
    "/models",
    "/props",
    "/responses",
    "/slots",
)


class LlamaCppErrorDetail(msgspec.Struct):
    code: int
    message: str
    type: str
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class LlamaCppErrorBody(msgspec.Struct):
    error: LlamaCppErrorDetail


def write(refusal: Refusal) -> LlamaCppErrorBody:
    error, kind = refusal.error, LLAMACPP_TYPES.get(refusal.status, "invalid_request_error")
    detail = LlamaCppErrorDetail(refusal.status, error.message, kind)
    if isinstance(error, ContextTooLong):
        detail.type = "exceed_context_size_error"
        detail.message = f"the request exceeds the available context size: {error.message}"
        detail.n_prompt_tokens = UNSET if error.prompt_tokens is None else error.prompt_tokens
        detail.n_ctx = UNSET if error.context is None else error.context
    return LlamaCppErrorBody(detail)


LLAMACPP_ERRORS = ErrorShape(LlamaCppErrorBody, write)

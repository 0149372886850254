"""Writes errors as Text Generation Inference does."""

from __future__ import annotations

import msgspec

from penstock.server.http.errors import ErrorShape, Refusal

TGI_TYPES = {429: "overloaded", 503: "overloaded"}


class TgiErrorBody(msgspec.Struct):
    error: str
    error_type: str


def write(refusal: Refusal) -> TgiErrorBody:
    kind = TGI_TYPES.get(refusal.status, "validation" if refusal.status < 500 else "generation")
    return TgiErrorBody(refusal.error.message, kind)


TGI_ERRORS = ErrorShape(TgiErrorBody, write, {400: 422})

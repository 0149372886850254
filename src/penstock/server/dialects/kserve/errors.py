"""Writes errors as KServe does."""

from __future__ import annotations

import msgspec

from penstock.server.http.errors import ErrorShape, Refusal


class KserveErrorBody(msgspec.Struct):
    error: str


def write(refusal: Refusal) -> KserveErrorBody:
    return KserveErrorBody(refusal.error.message)


KSERVE_ERRORS = ErrorShape(KserveErrorBody, write)

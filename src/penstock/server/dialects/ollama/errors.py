"""Writes errors as Ollama does."""

from __future__ import annotations

import msgspec

from penstock.server.http.errors import ErrorShape, Refusal


class OllamaErrorBody(msgspec.Struct):
    error: str


def write(refusal: Refusal) -> OllamaErrorBody:
    return OllamaErrorBody(refusal.error.message)


OLLAMA_ERRORS = ErrorShape(OllamaErrorBody, write, lines=True)

"""Serves POST /v1/embeddings, and contains what Ollama's embedding endpoints share with it."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.context.request_context import RequestContext
from penstock.server.generation.embeddings import (
    NO_EFFECT,
    EmbeddingsBody,
    EmbeddingUsage,
    base64_of,
    embedding_requests,
    floats_of,
    pooled,
)
from penstock.server.generation.explain import AnswerReport, report_of
from penstock.server.http.bodies import read_body
from penstock.server.http.errors import CLIENT_LEFT
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import encode
from penstock.server.models.served_model import ServedModel
from penstock.text import check_dimensions, embedding


class Embedding(msgspec.Struct):
    index: int
    embedding: msgspec.Raw
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"
    penstock: AnswerReport | UnsetType = UNSET


EMBEDDINGS = Operation(EmbeddingsBody, NO_EFFECT, EmbeddingList)


async def embeddings(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, EmbeddingsBody, NO_EFFECT)
    served.check_model(body.model, context)
    check_dimensions(body.dimensions, served.limits.dim)
    requests = await embedding_requests(served, context, body)
    spell = base64_of if body.encoding_format == "base64" else floats_of
    vectors = await pooled(served, http, context, requests, lambda state: spell(embedding(state, body.dimensions)))
    if vectors is None:
        return CLIENT_LEFT
    count = sum(len(request.prompt) for request in requests)
    data = [Embedding(index, vector) for index, vector in enumerate(vectors)]
    return Response(
        encode(EmbeddingList(data, served.name, EmbeddingUsage(count, count), penstock=report_of(context))),
        media_type="application/json",
    )

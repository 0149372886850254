"""Serves POST /embedding and /embeddings, in llama.cpp's own shape."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.llamacpp.prompts import Prompts, encode_prompts
from penstock.server.generation.embeddings import floats_of, pooled
from penstock.server.generation.tokens import only_one
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_body
from penstock.server.http.errors import CLIENT_LEFT
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import encode
from penstock.server.models.served_model import ServedModel
from penstock.text import embedding_request
from penstock.text.embedding import Vector, pooling_of, state_of

NO_EFFECT: NoEffect = {"model": ANY_VALUE, "encoding_format": ("float",)}
UNSCALED, BY_LARGEST, EUCLIDEAN = -1, 0, 2
LARGEST = 32760  # what the largest value becomes, so that values fit in 16 bits


class NativeEmbeddingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Takes exactly one of `content` and `input`."""

    content: Prompts | None = None
    input: Prompts | None = None
    embd_normalize: Annotated[int, Meta(ge=-1, le=64)] | None = None  # -1: as they are; 0: largest; 1, 2, ...: p-norm


class NativeEmbedding(msgspec.Struct):
    index: int
    embedding: list[msgspec.Raw]  # one vector


EMBEDDING = Operation(NativeEmbeddingFields, NO_EFFECT)


async def embedding(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, NativeEmbeddingFields, NO_EFFECT)
    only_one({"content": body.content, "input": body.input})
    given, param = (body.input, "input") if body.content is None else (body.content, "content")
    assert given is not None
    prompts = await encode_prompts(served, given, param, whole=True)
    limits, pooling = served.limits, pooling_of(None, served.limits)
    requests = [
        context.apply_to(embedding_request(served.client.next_id(), ids, limits.max_len, pooling, param=param))
        for ids in prompts
    ]
    order = EUCLIDEAN if body.embd_normalize is None else body.embd_normalize
    vectors = await pooled(served, http, context, requests, lambda state: floats_of(normalized(state_of(state), order)))
    if vectors is None:
        return CLIENT_LEFT
    answers = [NativeEmbedding(index, [vector]) for index, vector in enumerate(vectors)]
    return Response(encode(answers), media_type="application/json")


def normalized(vector: Vector, order: int) -> Vector:
    """Returns the vector scaled to a p-norm of 1 for an order of 1 and above, or as llama.cpp scales it for 0."""
    values = vector.astype(np.float64)
    if order == UNSCALED:
        return vector
    size = np.abs(values).max() / LARGEST if order == BY_LARGEST else np.linalg.norm(values, order)
    return (values / (size or 1.0)).astype("<f4")

"""Serves the embedding routes of Hugging Face's text-embeddings-inference (TEI): /embed and /similarity."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.rerank.scoring import Cutting, Pair, Single, embed_texts, score_pairs
from penstock.server.generation.embeddings import floats_of
from penstock.server.http.bodies import NoEffect, read_body
from penstock.server.http.errors import CLIENT_LEFT
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.served_model import ServedModel
from penstock.text import check_dimensions
from penstock.text.embedding import Vector, shortened

NO_EFFECT: NoEffect = {"truncation_direction": ["Right", "right"], "prompt_name": []}


class TeiEmbedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    inputs: str | list[str]
    normalize: bool | None = None  # default: true
    truncate: bool | None = None
    dimensions: int | None = None


class SimilarityInputs(msgspec.Struct, forbid_unknown_fields=True):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    truncate: bool | None = None


class SimilarityBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


TEI_EMBED = Operation(TeiEmbedBody, NO_EFFECT, list[list[float]])
SIMILARITY = Operation(SimilarityBody, NO_EFFECT, list[float])


async def embed(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, TeiEmbedBody, NO_EFFECT)
    check_dimensions(body.dimensions, served.limits.dim)
    given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    texts = [Single(text, f"inputs[{at}]" if len(given) > 1 else "inputs") for at, text in enumerate(given)]
    normalize = body.normalize is not False
    found = await embed_texts(served, http, context, texts, Cutting(cut=bool(body.truncate)))
    if found is None:
        return CLIENT_LEFT

    def finished(state: Vector) -> Vector:
        return shortened(state, body.dimensions) if normalize else state[: body.dimensions]

    return json_response([floats_of(finished(state)) for state in found[0]])


async def similarity(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, SimilarityBody, NO_EFFECT)
    if served.limits.generates or served.limits.labels:
        raise InvalidRequest("similarity needs an embedding model, and this model is not one", param="model")
    given = body.inputs
    pairs = [Pair(given.source_sentence, text, f"inputs.sentences[{at}]") for at, text in enumerate(given.sentences)]
    cut = Cutting(cut=bool(body.parameters and body.parameters.truncate))
    scored = await score_pairs(served, http, context, pairs, cut)
    return CLIENT_LEFT if scored is None else json_response([float(each[0]) for each in scored.logits])

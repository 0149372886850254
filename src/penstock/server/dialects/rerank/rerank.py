"""Serves the rerank routes. A body with `documents` is of Jina, Cohere, vLLM or llama.cpp, one with `texts` of TEI."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.rerank.score import Tokens, cutting_of
from penstock.server.dialects.rerank.scoring import (
    Cutting,
    Pair,
    Scored,
    ScoreUsage,
    activation_of,
    score_pairs,
    usage_of,
)
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_body
from penstock.server.http.errors import CLIENT_LEFT
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.served_model import ServedModel
from penstock.text.pairs import scores

NO_EFFECT: NoEffect = {
    "user": ANY_VALUE,
    "priority": [0],
    "return_embeddings": [False],
    "truncation_direction": ["Right", "right"],
    "mm_processor_kwargs": [],
}


class Document(msgspec.Struct):
    """Is a document of Jina's and Cohere's: only its text is read."""

    text: str


class RerankBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    query: str
    documents: list[str | Document] | None = None
    texts: list[str] | None = None  # TEI's
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0: all of them
    return_documents: bool | None = None
    return_text: bool | None = None  # TEI's
    raw_scores: bool | None = None  # TEI's: logits
    truncate: bool | None = None  # documents that are too long; TEI's and Jina's
    truncation: bool | None = None  # Voyage's name of the same
    truncate_prompt_tokens: Tokens | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None  # Cohere's
    max_chunks_per_doc: Annotated[int, Meta(ge=1)] | None = None
    rank_fields: list[str] | None = None
    instruction: str | None = None
    use_activation: bool | None = None


class DocumentText(msgspec.Struct):
    text: str


class RerankEntry(msgspec.Struct):
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class BilledUnits(msgspec.Struct):
    search_units: int = 1


class ApiVersion(msgspec.Struct):
    version: str


class RerankMeta(msgspec.Struct):
    """Is what Cohere's clients read besides the results."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankList(msgspec.Struct):
    id: str
    model: str
    results: list[RerankEntry]
    usage: ScoreUsage
    meta: RerankMeta
    object: str = "list"


class TeiRank(msgspec.Struct):
    index: int
    score: float
    text: str | UnsetType = UNSET


RERANK = Operation(RerankBody, NO_EFFECT, RerankList | list[TeiRank])


class Ranked(NamedTuple):
    """Is a document with its place in the request and its score."""

    place: int
    score: float
    text: str


async def rerank(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    return await _answer(served, http, context, cohere=False)


async def rerank_as_cohere(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    """Serves /v2/rerank, which only Cohere's clients know."""
    return await _answer(served, http, context, cohere=True)


async def _answer(served: ServedModel, http: HttpRequest, context: RequestContext, *, cohere: bool) -> Response:
    body = await read_body(http, context, RerankBody, NO_EFFECT)
    served.check_model(body.model, context)
    texts = _texts(body, context)
    name = "texts" if body.documents is None else "documents"
    pairs = [Pair(body.query, text, f"{name}[{at}]") for at, text in enumerate(texts)]
    scored = await score_pairs(served, http, context, pairs, _cutting(body, cohere), body.instruction or "")
    if scored is None:
        return CLIENT_LEFT
    if body.documents is None:
        return json_response(_tei(body, served, scored, texts))
    shown = body.return_documents if body.return_documents is not None else not cohere
    activation = "identity" if body.use_activation is False else activation_of(served.limits)
    ranked = _ranked(scored, texts, activation)[: body.top_n or None]
    results = [
        RerankEntry(index, score, DocumentText(text)) if shown else RerankEntry(index, score)
        for index, score, text in ranked
    ]
    meta = RerankMeta(ApiVersion("2" if cohere else "1"), BilledUnits())
    return json_response(RerankList(f"rerank-{context.id}", served.name, results, usage_of(scored), meta))


def _texts(body: RerankBody, context: RequestContext) -> list[str]:
    if (body.documents is None) == (body.texts is None):
        raise InvalidRequest(
            "send the texts to rank in documents (Jina, Cohere, vLLM) or in texts (TEI), one of the two",
            param="documents",
            code="missing_required_parameter",
        )
    if body.rank_fields not in (None, [], ["text"]):
        raise InvalidRequest("rank_fields other than text are not supported: send the text", param="rank_fields")
    if body.max_chunks_per_doc is not None:
        context.notes.ignore("max_chunks_per_doc")
    if not body.query:
        raise InvalidRequest("query is empty: send a text", param="query")
    given = body.texts if body.documents is None else body.documents
    return [each if isinstance(each, str) else each.text for each in given or ()]


def _cutting(body: RerankBody, cohere: bool) -> Cutting:
    """Returns the cutting. Cohere cuts documents that are too long; others refuse them unless a request asks for it."""
    if body.truncate_prompt_tokens is not None:
        return cutting_of(body.truncate_prompt_tokens)
    asked = body.truncate if body.truncate is not None else body.truncation
    cut = cohere or body.max_tokens_per_doc is not None if asked is None else asked
    return Cutting(None, cut, body.max_tokens_per_doc)


def _ranked(scored: Scored, texts: list[str], activation: str) -> list[Ranked]:
    """Returns the documents, the best one first; those with equal scores in the order of the request."""
    found = [Ranked(at, scores(each, activation)[0], texts[at]) for at, each in enumerate(scored.logits)]
    return sorted(found, key=lambda ranked: -ranked.score)


def _tei(body: RerankBody, served: ServedModel, scored: Scored, texts: list[str]) -> list[TeiRank]:
    """Returns the ranks in TEI's shape. Its scores are sigmoids of logits for every model."""
    activation = "identity" if body.raw_scores or not served.limits.labels else "sigmoid"
    ranked = _ranked(scored, texts, activation)
    return [TeiRank(index, score, text if body.return_text else UNSET) for index, score, text in ranked]

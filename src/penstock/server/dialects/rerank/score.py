"""Serves POST /score and /v1/score, in vLLM's shape."""

from __future__ import annotations

from time import time
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.rerank.scoring import (
    Cutting,
    Pair,
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

NO_EFFECT: NoEffect = {"user": ANY_VALUE, "encoding_format": ["float"], "priority": [0], "mm_processor_kwargs": []}
Tokens = Annotated[int, Meta(ge=-1)]  # -1: the size of the context


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None  # vLLM's later names of the same
    documents: str | list[str] | None = None
    truncate_prompt_tokens: Tokens | None = None
    use_activation: bool | None = None
    activation: bool | None = None  # its earlier name
    instruction: str | None = None


class ScoreEntry(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ScoreEntry]
    usage: ScoreUsage
    object: str = "list"


SCORE = Operation(ScoreBody, NO_EFFECT, ScoreList)


async def score(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, ScoreBody, NO_EFFECT)
    served.check_model(body.model, context)
    pairs = _pairs(body)
    cutting = cutting_of(body.truncate_prompt_tokens)
    scored = await score_pairs(served, http, context, pairs, cutting, body.instruction or "")
    if scored is None:
        return CLIENT_LEFT
    raw = False in (body.use_activation, body.activation)
    activation = "identity" if raw else activation_of(served.limits)
    data = [ScoreEntry(at, scores(logits, activation)[0]) for at, logits in enumerate(scored.logits)]
    return json_response(ScoreList(f"score-{context.id}", int(time()), served.name, data, usage_of(scored)))


def cutting_of(tokens: int | None) -> Cutting:
    return Cutting(None if tokens in (None, -1, 0) else tokens, cut=bool(tokens))


def _pairs(body: ScoreBody) -> list[Pair]:
    """Returns the pairs: one text with each of several, or two lists of equal length."""
    left, right = body.text_1, body.text_2
    names = ("text_1", "text_2") if body.queries is None and body.documents is None else ("queries", "documents")
    if names[0] == "queries":
        if left is not None or right is not None:
            raise InvalidRequest("send either text_1 and text_2, or queries and documents", param="text_1")
        left, right = body.queries, body.documents
    for name, given in zip(names, (left, right), strict=True):
        if given is None:
            raise InvalidRequest(f"the field {name!r} is missing", param=name, code="missing_required_parameter")
        if not given or (isinstance(given, list) and "" in given):
            raise InvalidRequest(f"{name} is empty or has an empty text: send texts", param=name)
    firsts, seconds = ([each] if isinstance(each, str) else list(each or ()) for each in (left, right))
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(
            f"{names[0]} has {len(firsts)} texts and {names[1]} has {len(seconds)}: send one text in the first, or "
            "equally many in both",
            param=names[0],
        )
    places = [names[1]] if isinstance(right, str) else [f"{names[1]}[{at}]" for at in range(len(seconds))]
    return [Pair(*each) for each in zip(firsts, seconds, places, strict=True)]

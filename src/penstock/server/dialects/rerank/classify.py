"""Serves POST /classify in vLLM's shape, and /predict in TEI's. A body with `inputs` is of TEI."""

from __future__ import annotations

from time import time

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.rerank import scoring
from penstock.server.dialects.rerank.score import Tokens, cutting_of
from penstock.server.dialects.rerank.scoring import Cutting, Pair, ScoreUsage, Single, activation_of, usage_of
from penstock.server.generation.embeddings import names_of
from penstock.server.generation.prompts import separate
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_body
from penstock.server.http.errors import CLIENT_LEFT
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import json_response
from penstock.server.models.served_model import ServedModel
from penstock.text.embedding import Vector
from penstock.text.pairs import scores
from penstock.types import Limits

NO_EFFECT: NoEffect = {"user": ANY_VALUE, "priority": [0], "truncation_direction": ["Right", "right"]}


class ClassifyParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Holds the options that Hugging Face's client sends with its input. It then expects a list of lists."""

    function_to_apply: str | None = None  # sigmoid, softmax or none
    top_k: int | None = None


class ClassifyBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    inputs: str | list[str | list[str]] | None = None  # TEI's: a text, two as a pair, or a list of lists of either
    raw_scores: bool | None = None  # TEI's: logits
    truncate: bool | None = None  # TEI's
    parameters: ClassifyParameters | None = None
    truncate_prompt_tokens: Tokens | None = None
    use_activation: bool | None = None
    activation: bool | None = None  # its earlier name


class ClassifyEntry(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ClassifyEntry]
    usage: ScoreUsage
    object: str = "list"


class TeiLabel(msgspec.Struct):
    label: str
    score: float


CLASSIFY = Operation(ClassifyBody, NO_EFFECT, ClassifyList | list[TeiLabel | list[TeiLabel]])


async def classify(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, ClassifyBody, NO_EFFECT)
    served.check_model(body.model, context)
    if (body.input is None) == (body.inputs is None):
        raise InvalidRequest(
            "send the texts in input (vLLM) or in inputs (TEI), one of the two",
            param="input",
            code="missing_required_parameter",
        )
    if body.inputs is not None:
        return await _predict(served, http, context, body, body.inputs)
    given = separate(body.input or [], "input")
    texts = [Single(*each) for each in zip(given, names_of(given), strict=True)]
    scored = await scoring.classify(served, http, context, texts, cutting_of(body.truncate_prompt_tokens))
    if scored is None:
        return CLIENT_LEFT
    activation = "identity" if False in (body.use_activation, body.activation) else activation_of(served.limits)
    data = [_entry(at, scores(logits, activation), served.limits) for at, logits in enumerate(scored.logits)]
    return json_response(ClassifyList(f"classify-{context.id}", int(time()), served.name, data, usage_of(scored)))


def _entry(index: int, found: list[float], limits: Limits) -> ClassifyEntry:
    best = max(range(len(found)), key=found.__getitem__)
    return ClassifyEntry(index, limits.labels[best], found, len(found))


# -- TEI ----------------------------------------------------------------------------------------------------------


async def _predict(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    body: ClassifyBody,
    inputs: str | list[str | list[str]],
) -> Response:
    several = isinstance(inputs, list) and any(isinstance(each, list) for each in inputs)
    units = inputs if several and isinstance(inputs, list) else [inputs]
    read = [_unit(each, f"inputs[{at}]" if several else "inputs") for at, each in enumerate(units)]
    scored = await scoring.classify(served, http, context, read, Cutting(cut=bool(body.truncate)))
    if scored is None:
        return CLIENT_LEFT
    labels = [_labels(each, body, served.limits) for each in scored.logits]
    return json_response(labels if several or body.parameters is not None else labels[0])


def _unit(given: str | list[str] | list[str | list[str]], param: str) -> Pair | Single:
    match [given] if isinstance(given, str) else given:
        case [str(text)]:
            return Single(text, param)
        case [str(first), str(second)]:
            return Pair(first, second, param)
    raise InvalidRequest(f"{param} must be a text, or a list of one or two texts", param=param)


def _labels(logits: Vector, body: ClassifyBody, limits: Limits) -> list[TeiLabel]:
    told = body.parameters or ClassifyParameters()
    asked = {"sigmoid": "sigmoid", "softmax": "softmax", "none": "identity", None: limits.activation}
    if told.function_to_apply not in asked:
        raise InvalidRequest(
            f"function_to_apply must be sigmoid, softmax or none; got {told.function_to_apply!r}",
            param="parameters.function_to_apply",
        )
    found = scores(logits, "identity" if body.raw_scores else asked[told.function_to_apply])
    ranked = sorted(map(TeiLabel, limits.labels, found), key=lambda each: -each.score)
    return ranked[: told.top_k if told.top_k and told.top_k > 0 else None]

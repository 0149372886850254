"""Serves POST /api/embed, and its predecessor /api/embeddings."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.ollama.derived_settings import settings_of
from penstock.server.dialects.ollama.fields import context_length, note_keep_alive
from penstock.server.generation.embeddings import check_count, check_texts, floats_of, names_of, pooled
from penstock.server.generation.explain import AnswerReport, report_of
from penstock.server.generation.modelfile import OPTION_NO_EFFECT, OllamaOptions
from penstock.server.generation.prompts import encode_prompts
from penstock.server.http.bodies import read_body
from penstock.server.http.errors import CLIENT_LEFT
from penstock.server.http.openapi import Operation, read_as
from penstock.server.http.sse import json_response
from penstock.server.models.served_model import ServedModel
from penstock.text import check_dimensions, embedding, embedding_request
from penstock.text.embedding import state_of, truncate_prompt
from penstock.types import Request


class OllamaEmbedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None  # 0: all
    options: Annotated[dict[str, Any], read_as(OllamaOptions, no_effect=OPTION_NO_EFFECT)] | None = None
    keep_alive: float | str | None = None


class OllamaOldEmbedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    prompt: str | None = None
    options: Annotated[dict[str, Any], read_as(OllamaOptions, no_effect=OPTION_NO_EFFECT)] | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[msgspec.Raw]
    total_duration: int  # nanoseconds
    load_duration: int = 0
    prompt_eval_count: int
    penstock: AnswerReport | UnsetType = UNSET


EMBED = Operation(OllamaEmbedBody, {}, OllamaEmbeddings)
OLD_EMBED = Operation(OllamaOldEmbedBody, {})


async def embed(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    began = perf_counter_ns()
    body = await read_body(http, context, OllamaEmbedBody, {})
    note_keep_alive(context, body.keep_alive)
    derived = settings_of(served, context, body.model)
    dimensions = body.dimensions or None
    check_dimensions(dimensions, served.limits.dim)
    inputs = [body.input] if isinstance(body.input, str) and body.input else list(body.input or ())
    check_count(inputs)
    length = context_length(served, context, derived.parameters | (body.options or {}))
    requests = await _requests(served, context, inputs, names_of(inputs), Cut(length, body.truncate is True))
    vectors = await pooled(served, http, context, requests, lambda state: floats_of(embedding(state, dimensions)))
    if vectors is None:
        return CLIENT_LEFT
    answer = OllamaEmbeddings(
        model=served.name,
        embeddings=vectors,
        total_duration=perf_counter_ns() - began,
        prompt_eval_count=sum(len(request.prompt) for request in requests),
        penstock=report_of(context),
    )
    return json_response(answer)


async def embed_old(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    """Returns the embedding of one text. Its length is not scaled to 1: clients of this endpoint expect that."""
    body = await read_body(http, context, OllamaOldEmbedBody, {})
    note_keep_alive(context, body.keep_alive)
    derived = settings_of(served, context, body.model)
    texts = [body.prompt] if body.prompt else []
    length = context_length(served, context, derived.parameters | (body.options or {}))
    requests = await _requests(served, context, texts, ["prompt"] * len(texts), Cut(length, None))
    vectors = await pooled(served, http, context, requests, lambda state: floats_of(state_of(state)))
    if vectors is None:
        return CLIENT_LEFT
    return json_response({"embedding": vectors[0] if vectors else []})


class Cut(NamedTuple):
    """Says how many tokens an input may have, and whether a longer one is cut; None: it never is on this endpoint."""

    length: int
    wanted: bool | None


async def _requests(
    served: ServedModel, context: RequestContext, texts: list[str], names: list[str], cut: Cut
) -> list[Request]:
    check_texts(texts, names)
    prompts = await encode_prompts(served, texts, whole=True)
    closing, pooling = served.text.tokenizer.closing, served.limits.pooling
    kept = [truncate_prompt(ids, cut.length, closing) if cut.wanted else ids for ids, _ in prompts]
    advice = "shorten it" if cut.wanted is None else "shorten it, or send truncate: true to have its end cut off"
    requests = [
        embedding_request(served.client.next_id(), ids, cut.length, pooling, param=name, advice=advice)
        for ids, name in zip(kept, names, strict=True)
    ]
    return [context.apply_to(request) for request in requests]

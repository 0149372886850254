"""POST /api/embed, and /api/embeddings, which was there before it."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Annotated, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.server.bodies import read_body
from penstock.server.errors import LEFT
from penstock.server.ollama.derived_settings import resolve
from penstock.server.ollama.fields import OPTION_NEUTRAL, Options, check_kept, context_of
from penstock.server.openai.completions import encode_prompts
from penstock.server.openai.embeddings import check_count, check_texts, floats_of, names_of, pooled
from penstock.server.openapi import Operation, read_as
from penstock.server.served_model import Served
from penstock.server.sse import encode
from penstock.text import check_dimensions, embedding, embedding_request
from penstock.text.embedding import state_of, truncate_prompt
from penstock.types import Request


class Embed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None  # 0: all
    options: Annotated[dict[str, Any], read_as(Options, neutral=OPTION_NEUTRAL)] | None = None
    keep_alive: float | str | None = None


class OldEmbed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    prompt: str | None = None
    options: Annotated[dict[str, Any], read_as(Options, neutral=OPTION_NEUTRAL)] | None = None
    keep_alive: float | str | None = None


class Embedded(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[msgspec.Raw]
    total_duration: int  # nanoseconds
    load_duration: int = 0
    prompt_eval_count: int


EMBED = Operation(Embed, {}, Embedded)
OLD_EMBED = Operation(OldEmbed, {})


async def embed(served: Served, http: HttpRequest) -> Response:
    began = perf_counter_ns()
    asked = await read_body(http, Embed, {})
    check_kept(asked.keep_alive)
    served, made = resolve(served, asked.model)
    dimensions = asked.dimensions or None
    check_dimensions(dimensions, served.limits.dim)
    inputs = [asked.input] if isinstance(asked.input, str) and asked.input else list(asked.input or ())
    check_count(inputs)
    context = context_of(served, made.parameters | (asked.options or {}))
    requests = await _requests(served, inputs, names_of(inputs), context, asked.truncate is True)
    vectors = await pooled(served, http, requests, lambda state: floats_of(embedding(state, dimensions)))
    if vectors is None:
        return LEFT
    told = Embedded(
        model=served.name,
        embeddings=vectors,
        total_duration=perf_counter_ns() - began,
        prompt_eval_count=sum(len(request.prompt) for request in requests),
    )
    return Response(encode(told), media_type="application/json")


async def embed_old(served: Served, http: HttpRequest) -> Response:
    """One text; its vector is as long as it is, as clients of this endpoint know it."""
    asked = await read_body(http, OldEmbed, {})
    check_kept(asked.keep_alive)
    served, made = resolve(served, asked.model)
    texts = [asked.prompt] if asked.prompt else []
    context = context_of(served, made.parameters | (asked.options or {}))
    requests = await _requests(served, texts, ["prompt"] * len(texts), context, truncate=None)
    vectors = await pooled(served, http, requests, lambda state: floats_of(state_of(state)))
    if vectors is None:
        return LEFT
    return Response(encode({"embedding": vectors[0] if vectors else []}), media_type="application/json")


async def _requests(
    served: Served, texts: list[str], names: list[str], context: int, truncate: bool | None
) -> list[Request]:
    """Of each text that is too long the end is cut off, if that was asked for. `truncate` None: it cannot be."""
    check_texts(texts, names)
    prompts = await encode_prompts(served, texts, whole=True)
    closing, pooling = served.text.tokenizer.closing, served.limits.pooling
    kept = [truncate_prompt(ids, context, closing) if truncate else ids for ids, _ in prompts]
    advice = "shorten it" if truncate is None else "shorten it, or send truncate: true to have its end cut off"
    return [
        embedding_request(served.client.next_id(), ids, context, pooling, param=name, advice=advice)
        for ids, name in zip(kept, names, strict=True)
    ]

"""Serves vLLM's routes that OpenAI does not have: what the server is, how busy it is, its tokenizer, and pooling."""

from __future__ import annotations

import secrets
import time

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import __version__
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
from penstock.server.http.bodies import NoEffect, read_body
from penstock.server.http.errors import CLIENT_LEFT
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import encode, json_response
from penstock.server.models.pool import ModelPool
from penstock.server.models.served_model import ServedModel
from penstock.text import check_dimensions, embedding
from penstock.text.embedding import state_of

POOLING_NO_EFFECT: NoEffect = NO_EFFECT | {
    "activation": (False,),
    "add_special_tokens": (True,),
    "softmax": (False,),
    "task": ("embed",),
}


class PoolingBody(EmbeddingsBody, kw_only=True):
    normalize: bool | None = None  # left out: true; false: the hidden state as it is


class PoolingResult(msgspec.Struct):
    index: int
    data: msgspec.Raw
    object: str = "pooling"


class PoolingList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[PoolingResult]
    usage: EmbeddingUsage
    object: str = "list"


POOLING = Operation(PoolingBody, POOLING_NO_EFFECT, PoolingList)


async def pooling(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, PoolingBody, POOLING_NO_EFFECT)
    served.check_model(body.model, context)
    check_dimensions(body.dimensions, served.limits.dim)
    requests = await embedding_requests(served, context, body)
    spell = base64_of if body.encoding_format == "base64" else floats_of

    def vector(state: bytes) -> msgspec.Raw:
        return spell(
            state_of(state)[: body.dimensions] if body.normalize is False else embedding(state, body.dimensions)
        )

    vectors = await pooled(served, http, context, requests, vector)
    if vectors is None:
        return CLIENT_LEFT
    count = sum(len(request.prompt) for request in requests)
    results = [PoolingResult(index, data) for index, data in enumerate(vectors)]
    id = f"pool-{secrets.token_hex(12)}"
    answer = PoolingList(id, int(time.time()), served.name, results, EmbeddingUsage(count, count))
    return Response(encode(answer), media_type="application/json")


async def version(_: ModelPool, __: HttpRequest, ___: RequestContext) -> Response:
    return json_response({"version": __version__})


async def ping(pool: ModelPool, _: HttpRequest, __: RequestContext) -> Response:
    pool.models.check_health()
    return Response()


async def load(pool: ModelPool, _: HttpRequest, __: RequestContext) -> Response:
    """Answers with the number of requests in all engines."""
    return json_response(
        {"server_load": sum(each.stats.running + each.stats.waiting for _, each in pool.models.clients())}
    )


async def tokenizer_info(served: ServedModel, _: HttpRequest, __: RequestContext) -> Response:
    """Answers with the facts that a client needs to count tokens and render chats itself: lm-eval asks for them."""
    text = served.text
    special: dict[str, str | None] = {f"{kind}_token": None for kind in ("bos", "eos", "pad", "unk")}
    if text.tokenizer.eos_ids:
        special["eos_token"] = text.tokenizer.token_text(min(text.tokenizer.eos_ids))
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            **text.tokenizer.names,
            "model_max_length": served.limits.max_len,
            "vocab_size": text.tokenizer.vocab_size,
            "clean_up_tokenization_spaces": False,
            "chat_template": (text.template.source or None) if text.template else None,
        }
    )

"""Serves SGLang's routes other than /generate: information, embeddings, and the prefix cache."""

from __future__ import annotations

from time import perf_counter
from typing import Annotated
from uuid import uuid4

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from penstock import __version__
from penstock.server.chat.stream import deltas, while_connected
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.sglang.generate import given_prompts
from penstock.server.generation.embeddings import MAX_INPUTS, floats_of, pooled
from penstock.server.generation.prompts import encode_prompts
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_body
from penstock.server.http.errors import CLIENT_LEFT
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import encode, json_response
from penstock.server.models.served_model import ServedModel
from penstock.text import embedding, embedding_request
from penstock.text.embedding import pooling_of
from penstock.types import SamplingParams
from penstock.types.messages import FlushCache

ENCODE_NO_EFFECT: NoEffect = {
    "audio_data": ([],),
    "image_data": ([],),
    "log_metrics": ANY_VALUE,
    "modalities": (["text"], []),
    "rid": ANY_VALUE,
    "sampling_params": ANY_VALUE,  # embeddings are not sampled
    "video_data": ([],),
}
HEALTH_PROMPT = "a"


class EncodeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Takes exactly one of `text` and `input_ids`. A list of prompts is answered with a list."""

    text: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    input_ids: Annotated[list[int | list[int]], Meta(min_length=1)] | None = None


class EncodeMeta(msgspec.Struct):
    id: str
    prompt_tokens: int
    e2e_latency: float  # seconds


class EncodedText(msgspec.Struct):
    embedding: msgspec.Raw
    meta_info: EncodeMeta


ENCODE = Operation(EncodeBody, ENCODE_NO_EFFECT)


async def encode_texts(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, EncodeBody, ENCODE_NO_EFFECT)
    began = perf_counter()
    source = "input_ids" if body.text is None else "text"
    prompts = await encode_prompts(served, given_prompts(body.text, body.input_ids), whole=True)
    for ids, _ in prompts:
        served.check_ids(ids, source)
    limits = served.limits
    requests = [
        context.apply_to(
            embedding_request(served.client.next_id(), ids, limits.max_len, pooling_of(None, limits), param=source)
        )
        for ids, _ in prompts
    ]
    vectors = await pooled(served, http, context, requests, lambda state: floats_of(embedding(state, None)))
    if vectors is None:
        return CLIENT_LEFT
    seconds = perf_counter() - began
    answers = [
        EncodedText(vector, EncodeMeta(uuid4().hex, len(request.prompt), seconds))
        for vector, request in zip(vectors, requests, strict=True)
    ]
    alone = isinstance(body.text, str) or (body.input_ids is not None and isinstance(body.input_ids[0], int))
    return Response(encode(answers[0] if alone else answers), media_type="application/json")


async def flush_cache(served: ServedModel, _: HttpRequest, __: RequestContext) -> Response:
    """Empties the prefix cache. Unlike SGLang it does so while requests run: they keep the blocks they hold."""
    served.client.tell(FlushCache())
    return PlainTextResponse("Cache flushed.\n")


async def health_generate(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    """Generates one token, so that a server whose engine hangs does not pass for a healthy one."""
    if served.encoder:
        return Response()
    prompt = served.text.encode_prompt(HEALTH_PROMPT)
    request = served.request(context, prompt, SamplingParams(temperature=0.0, max_tokens=1), "prompt")

    async def generate() -> Response:
        await deltas(served, context, request)(lambda choice, delta: None)
        return Response()

    return await while_connected(http.receive, generate()) or CLIENT_LEFT


async def model_info(served: ServedModel, _: HttpRequest, __: RequestContext) -> Response:
    return json_response(
        {
            "model_path": served.name,
            "tokenizer_path": served.name,
            "is_generation": not served.encoder,
            "preferred_sampling_params": None,
            "weight_version": served.client.weights.version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


async def server_info(served: ServedModel, _: HttpRequest, __: RequestContext) -> Response:
    limits, stats = served.limits, served.client.stats
    rate = stats.generated_tokens / stats.busy_seconds if stats.busy_seconds else 0.0
    state = {
        "last_gen_throughput": round(rate, 2),  # tokens per second of all steps so far
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
    }
    return json_response(
        {
            "model_path": served.name,
            "tokenizer_path": served.name,
            "served_model_name": served.name,
            "context_length": limits.max_len,
            "max_running_requests": limits.max_rows,
            "max_prefill_tokens": limits.step_tokens,
            "page_size": limits.block_size,
            "max_total_num_tokens": limits.num_blocks * limits.block_size,
            "max_req_input_len": limits.max_len - 1,
            "status": "ready",
            "internal_states": [state],
            "version": __version__,
        }
    )

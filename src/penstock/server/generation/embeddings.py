"""Reads the texts that a request wants embedded, and computes their pooled states."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from penstock.errors import InvalidRequest
from penstock.server.chat.stream import deltas, while_connected
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.prompts import encode_prompts, separate
from penstock.server.http.bodies import ANY_VALUE, NoEffect
from penstock.server.http.sse import encode
from penstock.server.models.served_model import ServedModel
from penstock.text import Delta, embedding_request
from penstock.text.embedding import Vector, pooling_of
from penstock.types import Request

MAX_INPUTS = 2048  # OpenAI's
CONCURRENT = 32  # inputs of one HTTP request in the engine at once, so that others get their turn
NO_EFFECT: NoEffect = {"user": ANY_VALUE}
T = TypeVar("T")


class EmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None  # left out: the served model
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last", "cls"] | None = None


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


async def embedding_requests(served: ServedModel, context: RequestContext, body: EmbeddingsBody) -> list[Request]:
    """Returns a request for each input; raises for inputs that are empty or too many."""
    inputs = separate(body.input, "input")
    check_count(inputs)
    names = names_of(inputs)
    for given, name in zip(inputs, names, strict=True):
        if not isinstance(given, str):
            served.check_ids(given, name)
    check_texts(inputs, names)
    limits, client = served.limits, served.client
    pooling = pooling_of(body.pooling, limits)
    prompts = await encode_prompts(served, inputs, whole=True)
    return [
        context.apply_to(embedding_request(client.next_id(), ids, limits.max_len, pooling, param=name))
        for (ids, _), name in zip(prompts, names, strict=True)
    ]


def check_count(inputs: Sequence[object]) -> None:
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(
            f"input has {len(inputs)} texts; at most {MAX_INPUTS} are allowed: send fewer at once", param="input"
        )


def names_of(inputs: Sequence[object]) -> list[str]:
    return ["input"] if len(inputs) == 1 else [f"input[{index}]" for index in range(len(inputs))]


def check_texts(inputs: Sequence[str | list[int]], names: Sequence[str]) -> None:
    """Raises for an empty text, which has a token all the same if the model wants a BOS."""
    for given, name in zip(inputs, names, strict=True):
        if not given:
            raise InvalidRequest(f"{name} is empty: send a text", param=name)


async def pooled(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    requests: Sequence[Request],
    spell: Callable[[bytes], T],
) -> list[T] | None:
    """Applies `spell` to the pooled state of each request; returns None if the client left. If one request fails,
    all do."""
    return await last_deltas(served, http, context, requests, lambda delta: spell(delta.pooled))


async def last_deltas(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    requests: Sequence[Request],
    read: Callable[[Delta], T],
) -> list[T] | None:
    """Applies `read` to the last delta of each request; returns None if the client left. If one request fails,
    all do."""
    return await while_connected(http.receive, _all(served, context, requests, read))


async def _all(
    served: ServedModel, context: RequestContext, requests: Sequence[Request], read: Callable[[Delta], T]
) -> list[T]:
    if not requests:
        return []
    waiting, found = iter(enumerate(requests)), dict[int, T]()

    def keep(index: int, delta: Delta) -> None:
        found[index] = read(delta)

    async def work() -> None:
        for index, request in waiting:
            await deltas(served, context, request, index)(keep)

    tasks = [asyncio.create_task(work()) for _ in range(min(CONCURRENT, len(requests)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [found[index] for index in range(len(requests))]


def floats_of(vector: Vector) -> msgspec.Raw:
    """Returns the vector as JSON. Vectors are encoded one by one: all at once would hold up every stream."""
    return msgspec.Raw(encode(vector.tolist()))


def base64_of(vector: Vector) -> msgspec.Raw:
    return msgspec.Raw(b'"%b"' % b64encode(vector.tobytes()))

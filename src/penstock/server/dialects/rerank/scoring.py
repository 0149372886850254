"""Computes scores of pairs and of texts for every dialect that has a route for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.embeddings import last_deltas, pooled
from penstock.server.models.served_model import ServedModel, off_loop
from penstock.text import Delta, embedding_request
from penstock.text.embedding import Vector, shortened, state_of, truncate_prompt
from penstock.text.pairs import PairPrompts, check_labels, check_scores, classify_request, cosine
from penstock.types import Limits, Request

MAX_PAIRS = 2048  # in one HTTP request


class Pair(NamedTuple):
    """Is a query and a document, with the field that the document came in."""

    first: str
    second: str
    param: str


class Single(NamedTuple):
    """Is a text, or its token ids, with the field that it came in."""

    text: str | list[int]
    param: str


class Cutting(NamedTuple):
    """Describes how long texts are cut."""

    longest: int | None = None  # tokens of a pair or a text; None: the size of the context
    cut: bool = False  # else they are refused
    document: int | None = None  # tokens of a pair's second text; None: limited by the context only


class Scored(NamedTuple):
    """Holds the results for some pairs or texts."""

    logits: list[Vector]  # per pair: one for each label, or the cosine similarity of the two embeddings
    tokens: int  # all prompts together
    cached: int = 0  # tokens with reused KV


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class ScoreUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


def usage_of(scored: Scored) -> ScoreUsage:
    return ScoreUsage(scored.tokens, scored.tokens, CachedTokens(scored.cached))


def activation_of(limits: Limits) -> str:
    """Returns the function that turns logits into scores. A cosine similarity is a score already."""
    return limits.activation or "identity"


async def score_pairs(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    pairs: Sequence[Pair],
    cutting: Cutting,
    instruction: str = "",
) -> Scored | None:
    """Returns one logit for each pair, or None if the client left. A model without a head that makes embeddings gives
    their cosine similarity; any other one without a head is refused."""
    _check_count(len(pairs), pairs[0].param.partition("[")[0] if pairs else "documents")
    limits = served.limits
    check_scores(limits)
    if limits.labels:
        prompts = await _encode_pairs(served, pairs, cutting, instruction)
        return await _logits(served, http, context, prompts, [pair.param for pair in pairs])
    if instruction:
        raise InvalidRequest("this model takes no instruction: leave it out", param="instruction")
    return await _cosines(served, http, context, pairs, cutting)


async def classify(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    inputs: Sequence[Pair | Single],
    cutting: Cutting,
) -> Scored | None:
    """Returns the logits of the labels of each text or pair, or None if the client left."""
    params = [each.param for each in inputs]
    _check_count(len(inputs), "input" if not inputs else params[0].partition("[")[0])
    check_labels(served.limits)
    prompts: list[list[int]] = []
    for each in inputs:
        if isinstance(each, Pair):
            prompts += await _encode_pairs(served, [each], cutting, "")
        else:
            prompts.append(await encode_text(served, each.text, each.param, cutting))
    return await _logits(served, http, context, prompts, params)


async def encode_text(served: ServedModel, text: str | list[int], param: str, cutting: Cutting) -> list[int]:
    """Returns the tokens of a whole text, cut if that is asked for."""
    if not text:
        raise InvalidRequest(f"{param} is empty: send a text", param=param)
    if isinstance(text, str):
        given = text
        ids = await off_loop(len(given), lambda: served.text.encode_whole(given))
    else:
        served.check_ids(text, param)
        ids = text
    longest = min(cutting.longest or served.limits.max_len, served.limits.max_len)
    return list(truncate_prompt(ids, longest, served.text.tokenizer.closing)) if cutting.cut else ids


async def embed_texts(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    texts: Sequence[Single],
    cutting: Cutting,
) -> tuple[list[Vector], int] | None:
    """Returns the pooled state of each text and how many tokens all have, or None if the client left."""
    _check_count(len(texts), texts[0].param.partition("[")[0] if texts else "inputs")
    limits, requests = served.limits, list[Request]()
    for text, param in texts:
        ids = await encode_text(served, text, param, cutting)
        request = embedding_request(served.client.next_id(), ids, limits.max_len, limits.pooling, param=param)
        requests.append(context.apply_to(request))
    found = await pooled(served, http, context, requests, state_of)
    return None if found is None else (found, sum(len(request.prompt) for request in requests))


async def _encode_pairs(
    served: ServedModel, pairs: Sequence[Pair], cutting: Cutting, instruction: str
) -> list[list[int]]:
    template, limits = served.text.pair_template, served.limits
    if instruction and not (template and template.instructed):
        raise InvalidRequest("this model takes no instruction: leave it out", param="instruction")
    if template is None and limits.generates:
        raise InvalidRequest("this reranker comes without a template for pairs: it cannot score", param="model")
    prompts = PairPrompts(
        served.text.tokenizer,
        template,
        limits,
        longest=cutting.longest,
        cut=cutting.cut,
        document_tokens=cutting.document,
        instruction=instruction,
    )
    size = sum(len(pair.first) + len(pair.second) for pair in pairs)
    process = template.chat.process if template and template.chat else None
    return await off_loop(size, lambda: [prompts.encode(*pair) for pair in pairs], process)


async def _logits(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    prompts: Sequence[list[int]],
    params: Sequence[str],
) -> Scored | None:
    requests = [
        context.apply_to(classify_request(served.client.next_id(), prompt, served.limits, param))
        for prompt, param in zip(prompts, params, strict=True)
    ]
    found = await last_deltas(served, http, context, requests, _logits_and_cached)
    if found is None:
        return None
    return Scored(
        [logits for logits, _ in found],
        sum(len(request.prompt) for request in requests),
        sum(cached for _, cached in found),
    )


def _logits_and_cached(delta: Delta) -> tuple[Vector, int]:
    return state_of(delta.pooled), delta.report.cached if delta.report else 0


async def _cosines(
    served: ServedModel, http: HttpRequest, context: RequestContext, pairs: Sequence[Pair], cutting: Cutting
) -> Scored | None:
    """Returns the cosine similarity of each pair's embeddings. A text that occurs in several pairs is embedded once."""
    texts = {text: pair.param for pair in pairs for text in (pair.first, pair.second)}
    found = await embed_texts(served, http, context, [Single(*each) for each in texts.items()], cutting)
    if found is None:
        return None
    vectors = dict(zip(texts, map(shortened, found[0]), strict=True))
    cosines = [cosine(vectors[pair.first], vectors[pair.second]) for pair in pairs]
    return Scored([np.array([each], np.float32) for each in cosines], found[1])


def _check_count(count: int, param: str) -> None:
    if not 0 < count <= MAX_PAIRS:
        raise InvalidRequest(
            f"{param} has {count} texts; from 1 to {MAX_PAIRS} are allowed: send fewer at once", param=param
        )

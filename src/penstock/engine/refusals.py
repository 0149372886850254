"""Refuses requests that the engine could never answer, before they are taken in."""

from __future__ import annotations

from penstock.errors import InvalidRequest
from penstock.types import Limits, Request


def refuse_wrong_kind(request: Request, limits: Limits, classifies: bool) -> None:
    """Raises InvalidRequest for a request that asks for something else than the model makes."""
    if not (limits.generates or request.pooling):
        raise InvalidRequest("this model makes embeddings and no text: ask for an embedding", param="model")
    if request.pooling == "classify" and not classifies:
        raise InvalidRequest("this model has no classification head: ask for an embedding", param="model")


def check_ids(request: Request, vocab: int) -> None:
    """Raises InvalidRequest for token ids that have no logit."""
    params = request.sampling
    banned = (id for word in request.bad_words for id in word)
    allowed = params.allowed_token_ids or ()
    for name, ids in (("logit_bias", params.logit_bias), ("allowed_token_ids", allowed), ("bad_words", banned)):
        for id in ids:
            if not 0 <= id < vocab:
                raise InvalidRequest(f"{name}: token ids are from 0 to {vocab - 1}; got {id}", param=name)


def refuse_logprobs(request: Request) -> None:
    """Raises InvalidRequest for logprobs with a thinking budget: what closes the thinking is not sampled."""
    if request.sampling.logprobs is not None:
        raise InvalidRequest(
            "logprobs cannot be given with a thinking budget, because the tokens that end the thinking are not "
            "sampled: send one of the two",
            param="logprobs",
        )

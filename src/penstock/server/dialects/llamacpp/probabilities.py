"""Returns the probabilities of tokens in llama.cpp's shape: of the model, or of what its samplers leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.chat.logprobs import finite_logprob
from penstock.text import Delta, Tokenizer
from penstock.types import SamplerChain, SamplingParams, TokenLogprob


class TokenCandidate(msgspec.Struct):
    id: int
    token: str
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


C = TypeVar("C", bound=TokenCandidate)


class TokenProbability(TokenCandidate):
    top_logprobs: list[TokenCandidate] | UnsetType = UNSET
    top_probs: list[TokenCandidate] | UnsetType = UNSET


def probabilities(
    tokenizer: Tokenizer, delta: Delta, count: int, after: SamplingParams | None = None
) -> list[TokenProbability]:
    """Returns an entry for each of the delta's tokens that is part of the text, with the `count` most likely tokens.
    Probabilities are the model's own, or those `after` sampling."""
    scored = delta.logprobs[: len(delta.logprobs) - delta.silent]
    if after is not None:
        return [_after_sampling(tokenizer, each, count, after) for each in scored]
    return [_of_the_model(tokenizer, each, count) for each in scored]


def _of_the_model(tokenizer: Tokenizer, scored: TokenLogprob, count: int) -> TokenProbability:
    top = [_spelled(TokenCandidate, tokenizer, id, logprob=finite_logprob(value)) for id, value in scored.top[:count]]
    entry = _spelled(TokenProbability, tokenizer, scored.token, logprob=finite_logprob(scored.logprob))
    entry.top_logprobs = top
    return entry


def _after_sampling(tokenizer: Tokenizer, scored: TokenLogprob, count: int, params: SamplingParams) -> TokenProbability:
    """Returns the entry with probabilities among the candidates that top_k, top_p, min_p and the temperature leave of
    the most likely tokens, which are all that the engine returns, and of the chosen one."""
    seen = scored.top if scored.token in dict(scored.top) else (*scored.top, (scored.token, scored.logprob))
    left = _left(seen, params)
    entry = _spelled(TokenProbability, tokenizer, scored.token, prob=left.get(scored.token, 0.0))
    likeliest = list(left.items())[:count]
    entry.top_probs = [_spelled(TokenCandidate, tokenizer, id, prob=value) for id, value in likeliest]
    return entry


def _left(top: Sequence[tuple[int, float]], params: SamplingParams) -> dict[int, float]:
    """Returns the probabilities of the candidates that are left, the most likely first."""
    left = [(id, value) for id, value in top if math.isfinite(value)]
    for sampler in (params.chain or SamplerChain()).order:
        match sampler:
            case "top_k" if params.top_k > 0:
                left = left[: params.top_k]
            case "top_p" if params.top_p < 1:
                left = left[: _reaching([value for _, value in left], params.top_p)]
            case "min_p" if params.min_p > 0:
                left = [(id, value) for id, value in left if value >= left[0][1] + math.log(params.min_p)]
            case "temperature":
                heat = params.temperature
                left = [(id, value / heat) for id, value in left] if heat > 0 else left[:1]
    return dict(zip((id for id, _ in left), _normalized([value for _, value in left]), strict=True))


def _reaching(logits: Sequence[float], mass: float) -> int:
    """Returns how many of the most likely have this mass together."""
    total = 0.0
    for count, chance in enumerate(_normalized(logits), 1):
        total += chance
        if total >= mass:
            return count
    return len(logits)


def _normalized(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(value - max(logits)) for value in logits]
    return [weight / sum(weights) for weight in weights]


def _spelled(kind: type[C], tokenizer: Tokenizer, id: int, **value: float) -> C:
    spelling = tokenizer.token_bytes(id)
    return kind(id=id, token=spelling.decode("utf-8", "replace"), bytes=list(spelling), **value)

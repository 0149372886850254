"""Returns log probabilities of tokens in the shape that OpenAI's chat and responses and Ollama's chat share."""

from __future__ import annotations

import msgspec

from penstock.text import Delta, Tokenizer
from penstock.types import TokenLogprob

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


class TokenAlternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(TokenAlternative):
    top_logprobs: list[TokenAlternative]


def finite_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def token_entries(tokenizer: Tokenizer, delta: Delta) -> list[TokenEntry]:
    """Returns an entry for each of the delta's tokens that is part of the text, if logprobs were asked for."""
    return [_entry(tokenizer, each) for each in delta.logprobs[: len(delta.logprobs) - delta.silent]]


def _entry(tokenizer: Tokenizer, scored: TokenLogprob) -> TokenEntry:
    top = [TokenAlternative(*_spelled(tokenizer, token, logprob)) for token, logprob in scored.top]
    return TokenEntry(*_spelled(tokenizer, scored.token, scored.logprob), top)


def _spelled(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    spelling = tokenizer.token_bytes(token)
    return spelling.decode("utf-8", "replace"), finite_logprob(logprob), list(spelling)
